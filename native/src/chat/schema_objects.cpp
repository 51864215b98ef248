#include "schema_objects.h"

#include <algorithm>
#include <set>

#include "schema_keywords.h"

namespace s2moe {
namespace {

constexpr size_t n_optional_max = 200; // properties of one object
constexpr size_t name_bytes_max = 200; // the converter's regular expressions recurse over a name

// llama.cpp writes the characters of names into character classes as they are, to keep other properties off them.
bool is_plain(const std::string & name) {
    return std::none_of(name.begin(), name.end(), [](char c) {
        return static_cast<unsigned char>(c) < 0x20 || c == '"' || c == '\\' || c == ']' || c == '^';
    });
}

// Whether a grammar has the listed properties only.
bool is_closed(const common_json & schema) {
    return schema.contains("additionalProperties") ? schema.at("additionalProperties") == false
                                                   : schema.contains("properties");
}

std::set<std::string> names_of(const common_json & properties, const std::string & path, const schema_report & report) {
    std::set<std::string> names;
    for (const auto & entry : properties.items()) {
        if (entry.key().size() > name_bytes_max) {
            report.fail(path, "a property's name is longer than " + std::to_string(name_bytes_max) + " bytes");
        }
        names.insert(entry.key());
    }
    return names;
}

// The names that are demanded, all of them properties.
std::set<std::string> prepare_required(common_json & schema,
                                       const std::string & path,
                                       const std::set<std::string> & properties,
                                       schema_report & report) {
    std::set<std::string> required;
    if (!schema.contains("required")) {
        return required;
    }
    if (!schema.at("required").is_array()) { // draft 3 has true and false here
        report.lose(schema, path, "required", "must be a list of names");
        return required;
    }
    for (const common_json & entry : schema.at("required")) {
        if (!entry.is_string()) {
            report.fail(path, "required must be a list of names");
        }
        const std::string name = entry.get<std::string>();
        if (properties.count(name) != 0) {
            required.insert(name);
            continue;
        }
        if (!report.is_lenient()) {
            report.fail(path, "required names " + name + ", which is not among the properties");
        }
        report.note(path, "required");
    }
    return required;
}

void check_optional(const std::string & path, size_t n_optional, schema_report & report) {
    if (n_optional > n_optional_max) {
        report.fail(path, "has more than " + std::to_string(n_optional_max) + " properties that are not required");
    }
    report.budget().optional_pairs -= static_cast<int64_t>(n_optional * n_optional);
    if (report.budget().optional_pairs < 0) {
        report.fail(path, "there are too many objects with many properties that are not required");
    }
}

// What is true of the properties of every such object is no loss.
void note_counts(
    common_json & schema, const std::string & path, size_t n_required, size_t n_properties, schema_report & report) {
    const auto is_number = [&](const char * key) { return schema.contains(key) && schema.at(key).is_number(); };
    if (!is_number("minProperties") || schema.at("minProperties").get<double>() > static_cast<double>(n_required)) {
        report.note_if_present(schema, path, "minProperties");
    }
    if (!is_closed(schema) || !is_number("maxProperties") ||
        schema.at("maxProperties").get<double>() < static_cast<double>(n_properties)) {
        report.note_if_present(schema, path, "maxProperties");
    }
}

void prepare_others(common_json & schema,
                    const std::string & path,
                    const std::set<std::string> & properties,
                    schema_report & report) {
    if (schema.contains("unevaluatedProperties") && schema.at("unevaluatedProperties") != true && !is_closed(schema)) {
        if (schema.contains("additionalProperties")) {
            report.lose(
                schema, path, "unevaluatedProperties", "beside additionalProperties cannot be written as a grammar");
        } else { // no property is evaluated
            const common_json others = schema.at("unevaluatedProperties");
            schema.erase("unevaluatedProperties");
            schema["additionalProperties"] = others;
        }
    }
    if (!schema.contains("additionalProperties")) {
        return;
    }
    if (!schema.at("additionalProperties").is_object() && !schema.at("additionalProperties").is_boolean()) {
        report.fail(path, "additionalProperties must be a schema, true or false");
    }
    if (schema.at("additionalProperties") != false && !std::all_of(properties.begin(), properties.end(), is_plain)) {
        report.lose(schema,
                    path,
                    "additionalProperties",
                    "cannot be written as a grammar beside a name with one of \"\\]^ or a control character");
    }
}

} // namespace

void prepare_object(common_json & schema, const std::string & path, schema_report & report) {
    if (!allows_type(schema, "object")) {
        return;
    }
    std::set<std::string> properties;
    if (schema.contains("properties")) {
        if (!schema.at("properties").is_object()) {
            report.fail(path, "properties must be an object");
        }
        properties = names_of(schema.at("properties"), path, report);
    }
    const std::set<std::string> required = prepare_required(schema, path, properties, report);
    check_optional(path, properties.size() - required.size(), report);
    prepare_others(schema, path, properties, report);
    note_counts(schema, path, required.size(), properties.size(), report);
}

} // namespace s2moe
