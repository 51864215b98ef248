#include "schema_refs.h"

#include <algorithm>

#include "error.h"

namespace s2moe {
namespace {

constexpr size_t ref_bytes_max = 400; // the converter's regular expressions recurse over it

bool is_index(const std::string & text, size_t size) {
    return !text.empty() && text.size() < 6 && text.find_first_not_of("0123456789") == std::string::npos &&
           std::to_string(std::stoul(text)) == text && std::stoul(text) < size;
}

} // namespace

void schema_refs::fail(const std::string & path, const std::string & what) const {
    throw failure(S2MOE_ERROR_GRAMMAR, name + " at " + path + ": " + what);
}

common_json & schema_refs::resolve(const std::string & ref, const std::string & path) const {
    if (ref.size() > ref_bytes_max || ref.rfind("#/", 0) != 0 || ref.find('~') != std::string::npos) {
        fail(path, "$ref " + ref.substr(0, 80) + " is not supported: only #/… within this schema is");
    }
    enum { at_schema, at_names, at_list } state = at_schema;
    common_json * target = &root;
    for (size_t begin = 2; begin <= ref.size();) {
        const size_t end = std::min(ref.find('/', begin), ref.size());
        const std::string key = ref.substr(begin, end - begin);
        begin = end + 1;
        if (state == at_list ? !(target->is_array() && is_index(key, target->size()))
                             : !(target->is_object() && target->contains(key))) {
            fail(path, "$ref " + ref + " leads nowhere");
        }
        target = state == at_list ? &target->at(std::stoul(key)) : &target->at(key);
        if (state != at_schema) {
            state = at_schema;
        } else if (key == "properties" || key == "$defs" || key == "definitions") {
            state = at_names;
        } else if (key == "anyOf" || key == "oneOf" || key == "allOf" || key == "prefixItems") {
            state = at_list;
        } else if (key == "items") {
            state = target->is_array() ? at_list : at_schema;
        } else if (key != "additionalProperties") {
            fail(path, "$ref " + ref + " leads to what is no schema");
        }
    }
    if (state != at_schema) {
        fail(path, "$ref " + ref + " leads to what is no schema");
    }
    return *target;
}

const common_json & schema_refs::resolve_chain(const common_json & schema, const std::string & path) const {
    const common_json * target = &schema;
    for (int i = 0; target->is_object() && target->contains("$ref"); ++i) {
        if (!target->at("$ref").is_string()) {
            fail(path, "$ref must be a string");
        }
        if (i == schema_depth_max) {
            fail(path, "$ref leads back to itself");
        }
        target = &resolve(target->at("$ref").get<std::string>(), path);
    }
    return *target;
}

size_t schema_refs::count_alternatives(const common_json & schema, const std::string & path, int depth) {
    if (!schema.is_object() || depth > 2 * schema_depth_max) {
        return 1;
    }
    if (schema.contains("$ref") && schema.at("$ref").is_string()) {
        const std::string ref = schema.at("$ref").get<std::string>();
        const auto known = counted.find(ref);
        if (known != counted.end()) {
            return known->second;
        }
        if (!open.insert(ref).second) {
            return 1;
        }
        const size_t n = count_alternatives(resolve(ref, path), path, depth + 1);
        open.erase(ref);
        return counted[ref] = n;
    }
    size_t n = 0;
    for (const char * key : {"anyOf", "oneOf", "allOf"}) {
        if (schema.contains(key) && schema.at(key).is_array()) {
            for (const common_json & part : schema.at(key)) {
                n = std::min(n + count_alternatives(part, path, depth + 1), n_alternatives_max + 1);
            }
        }
    }
    return std::max(n, size_t{1});
}

} // namespace s2moe
