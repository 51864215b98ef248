#include "schema_alternatives.h"

#include <array>
#include <set>
#include <string_view>
#include <vector>

#include "schema_keywords.h"
#include "schema_outline.h"

namespace s2moe {
namespace {

constexpr std::array combinations = {"anyOf", "oneOf", "allOf"};
constexpr size_t n_compared_max = 64; // alternatives of a oneOf; more are taken to overlap

bool stands_alone(const common_json & schema, const char * key) {
    for (const auto & entry : schema.items()) {
        const bool is_type = entry.key() == "type" && entry.value().is_string();
        if (entry.key() != key && !is_type && !is_annotation(entry.key())) {
            return false;
        }
    }
    return true;
}

// allOf with one part is that part.
bool is_one_part(common_json & schema, const std::string & path, const schema_report & report) {
    if (schema.at("allOf").size() != 1) {
        return false;
    }
    const common_json part = schema.at("allOf").at(size_t{0});
    if (!part.is_object()) {
        report.fail(path + "/allOf/0", "must be an object");
    }
    schema.erase("allOf");
    schema.set({"anyOf", common_json::array({part})});
    return true;
}

// What llama.cpp looks at in a part are its properties.
bool can_be_joined(const common_json & part, std::set<std::string> & properties) {
    if (!part.is_object() || !part.contains("properties") || !part.at("properties").is_object() ||
        (part.contains("type") && part.at("type") != "object")) {
        return false;
    }
    for (const char * key : {"anyOf", "oneOf", "allOf", "enum", "const", "maxProperties"}) {
        if (part.contains(key)) {
            return false;
        }
    }
    for (const char * key : {"additionalProperties", "unevaluatedProperties"}) {
        if (part.contains(key) && part.at(key) != true) {
            return false; // they exclude the properties of other parts
        }
    }
    for (const auto & entry : part.at("properties").items()) {
        if (!properties.insert(entry.key()).second) {
            return false;
        }
    }
    return true;
}

bool can_be_joined(const common_json & schema, const std::string & path, const schema_refs & refs) {
    if (schema.contains("type") && schema.at("type") != "object") {
        return false;
    }
    std::set<std::string> properties;
    for (const common_json & part : schema.at("allOf")) {
        if (!can_be_joined(refs.resolve_chain(part, path), properties)) {
            return false;
        }
    }
    return true;
}

// llama.cpp passes over a type beside alternatives, so each of them gets it.
void spread_type(common_json & schema,
                 const std::string & path,
                 const char * key,
                 const schema_refs & refs,
                 schema_report & report) {
    if (!schema.contains("type")) {
        return;
    }
    const std::string type = schema.at("type").get<std::string>();
    for (common_json & part : schema.at(key)) {
        if (part.is_boolean() && part.get<bool>()) {
            part = common_json::object();
        }
        if (!part.is_object()) {
            continue; // refused where it is prepared
        }
        const common_json & target = refs.resolve_chain(part, path);
        if (&target == &part && !part.contains("type")) {
            part["type"] = type;
            continue;
        }
        const bool is_same = target.is_object() && target.contains("type") &&
                             (target.at("type") == type || (type == "number" && target.at("type") == "integer"));
        if (!is_same) {
            report.lose(schema, path, "type", std::string("beside ") + key + " must be that of each alternative");
            return;
        }
    }
}

bool may_overlap(const common_json & parts, const std::string & path, const schema_refs & refs, int64_t & budget) {
    if (parts.size() > n_compared_max) {
        return true;
    }
    std::vector<schema_outline> outlines;
    for (const common_json & part : parts) {
        outlines.push_back(outline_of(part, refs, path));
    }
    for (size_t i = 0; i < outlines.size(); ++i) {
        for (size_t j = 0; j < i; ++j) {
            if (!are_disjoint(outlines[i], outlines[j], budget)) {
                return true;
            }
        }
    }
    return false;
}

} // namespace

void check_alternatives(const common_json & schema,
                        const std::string & path,
                        schema_refs & refs,
                        const schema_report & report) {
    if (refs.count_alternatives(schema, path) > schema_refs::n_alternatives_max) {
        report.fail(path, "has more than " + std::to_string(schema_refs::n_alternatives_max) + " alternatives");
    }
}

void prepare_alternatives(common_json & schema, const std::string & path, schema_refs & refs, schema_report & report) {
    for (const char * key : combinations) {
        if (schema.contains(key) && (!schema.at(key).is_array() || schema.at(key).empty())) {
            report.fail(path, std::string(key) + " must be a list of schemas");
        }
    }
    check_alternatives(schema, path, refs, report);
    for (const char * key : combinations) {
        if (!schema.contains(key)) {
            continue;
        }
        if (!stands_alone(schema, key)) {
            report.lose(schema, path, key, "beside other keywords cannot be written as a grammar");
        } else if (std::string_view(key) == "allOf" && !is_one_part(schema, path, report) &&
                   !can_be_joined(schema, path, refs)) {
            report.lose(schema,
                        path,
                        key,
                        "cannot be written as a grammar, unless all parts are objects with different properties that "
                        "leave additionalProperties open; write one object instead");
        }
    }
    for (const char * key : {"anyOf", "oneOf"}) {
        if (schema.contains(key)) {
            spread_type(schema, path, key, refs, report);
        }
    }
    if (schema.contains("oneOf") && may_overlap(schema.at("oneOf"), path, refs, report.budget().comparisons)) {
        report.note(path, "oneOf");
    }
}

} // namespace s2moe
