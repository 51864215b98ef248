#include "schema_refs.h"

#include <algorithm>
#include <vector>

#include "schema_pointer.h"

namespace s2moe {
namespace {

std::vector<std::string> names_of(const std::string & ref) {
    std::vector<std::string> names;
    for (size_t begin = 2; begin <= ref.size();) {
        const size_t end = std::min(ref.find('/', begin), ref.size());
        names.push_back(ref.substr(begin, end - begin));
        begin = end + 1;
    }
    return names;
}

} // namespace

common_json & schema_refs::resolve(const std::string & ref, const std::string & path) const {
    common_json * target = &root;
    for (const std::string & name : names_of(ref)) {
        if (!target->is_object() || !target->contains(name)) {
            report.fail(path, "$ref " + report.place(path_of(ref)) + " leads into what had to be left out");
        }
        target = &target->at(name);
    }
    return *target;
}

std::string schema_refs::path_of(const std::string & ref) {
    return pointer_to(names_of(ref));
}

const common_json & schema_refs::resolve_chain(const common_json & schema, const std::string & path) const {
    const common_json * target = &schema;
    for (int i = 0; target->is_object() && target->contains("$ref"); ++i) {
        if (i == schema_depth_max) {
            report.fail(path, "$ref leads back to itself; leave it out, or let it lead to a schema of a value");
        }
        target = &resolve(target->at("$ref").get<std::string>(), path);
    }
    return *target;
}

size_t schema_refs::count_alternatives(const common_json & schema, const std::string & path, int depth) {
    if (!schema.is_object() || depth > 2 * schema_depth_max) {
        return 1;
    }
    if (schema.contains("$ref")) {
        const std::string ref = schema.at("$ref").get<std::string>();
        const auto known = counted.find(ref);
        if (known != counted.end()) {
            return known->second;
        }
        if (!open.insert(ref).second) {
            report.fail(path,
                        "$ref " + report.place(path_of(ref)) +
                            " leads back to itself with no object or array in between, so that nothing would ever "
                            "match; leave it out, or put it below properties or items");
        }
        const size_t n = count_alternatives(resolve(ref, path), path_of(ref), depth + 1);
        open.erase(ref);
        return counted[ref] = n;
    }
    size_t n = 0;
    for (const char * key : {"anyOf", "oneOf", "allOf"}) {
        if (!schema.contains(key) || !schema.at(key).is_array()) {
            continue;
        }
        const common_json & parts = schema.at(key);
        for (size_t i = 0; i < parts.size(); ++i) {
            const std::string place = path + "/" + key + "/" + std::to_string(i);
            n = std::min(n + count_alternatives(parts.at(i), place, depth + 1), n_alternatives_max + 1);
        }
    }
    return std::max(n, size_t{1});
}

} // namespace s2moe
