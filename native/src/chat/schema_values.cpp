#include "schema_values.h"

#include <algorithm>
#include <array>
#include <set>

#include "schema_keywords.h"

namespace s2moe {
namespace {

constexpr std::array type_names = {"array", "boolean", "integer", "null", "number", "object", "string"};
// They narrow down the values of a type.
constexpr std::array limits = {"pattern",
                               "format",
                               "minLength",
                               "maxLength",
                               "minimum",
                               "maximum",
                               "exclusiveMinimum",
                               "exclusiveMaximum",
                               "multipleOf",
                               "items",
                               "prefixItems",
                               "minItems",
                               "maxItems",
                               "uniqueItems",
                               "properties",
                               "required",
                               "minProperties",
                               "maxProperties",
                               "additionalProperties"};

bool is_of_type(const common_json & value, const common_json & schema) {
    const std::string_view type = type_of(value);
    return allows_type(schema, type) || (type == "integer" && allows_type(schema, "number"));
}

bool is_in(const common_json & value, const common_json & list) {
    return std::any_of(
        list.begin(), list.end(), [&](const common_json & each) { return each == common_json_value(value); });
}

} // namespace

void check_type(common_json & schema, const std::string & path, const schema_report & report) {
    if (!schema.contains("type")) {
        return;
    }
    if (schema.at("type").is_null()) {
        schema.erase("type");
        return;
    }
    const auto check_name = [&](const common_json & name) {
        if (std::none_of(type_names.begin(), type_names.end(), [&](const char * each) { return name == each; })) {
            report.fail(path,
                        "type " + name.dump_safe().substr(0, 80) +
                            " is unknown; use array, boolean, integer, null, number, object or string");
        }
    };
    const common_json & type = schema.at("type");
    if (!type.is_array()) {
        check_name(type);
        return;
    }
    std::set<std::string> names;
    for (const common_json & name : type) {
        check_name(name);
        if (!names.insert(name.get<std::string>()).second) {
            report.fail(path, "type must be a list of different names");
        }
    }
    if (names.empty()) {
        report.fail(path, "type must not be empty");
    }
}

void prepare_values(common_json & schema, const std::string & path, schema_report & report) {
    const bool has_const = schema.contains("const");
    const bool has_enum = schema.contains("enum");
    if (has_enum && (!schema.at("enum").is_array() || schema.at("enum").empty())) {
        report.fail(path, "enum must be a list with at least one value");
    }
    if (!has_const && !has_enum) {
        return;
    }
    if (has_const && has_enum && !is_in(schema.at("const"), schema.at("enum"))) {
        report.fail(path, "const is none of the values of enum");
    }
    common_json values = common_json::array();
    for (const common_json & value : has_const ? common_json::array({schema.at("const")}) : schema.at("enum")) {
        if (is_of_type(value, schema)) {
            values.push_back(value);
        }
    }
    if (values.empty()) {
        report.fail(path, std::string(has_const ? "const" : "enum") + " has no value of the type");
    }
    if (!has_const) {
        schema["enum"] = values;
    }
    if (schema.contains("type") && schema.at("type").is_array()) {
        schema.erase("type"); // llama.cpp would write the values once for each
    }
    for (const char * key : limits) {
        if (schema.contains(key)) {
            report.drop(schema, path, key);
        }
    }
}

} // namespace s2moe
