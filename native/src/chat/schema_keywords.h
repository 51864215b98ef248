// What keywords of JSON schema are, where more than one of its parts asks.

#pragma once

#include <string>
#include <string_view>

#include "json.h"
#include "schema_pointer.h"

namespace s2moe {

// Whether a keyword says nothing about what is valid.
bool is_annotation(const std::string & key);

// Whether a schema's `type`, if it has one, names this type.
bool allows_type(const common_json & schema, std::string_view type);

// The type of a value; a number without a fraction is an "integer".
std::string_view type_of(const common_json & value);

// Calls visit(part, path of the part) for each schema right inside a schema.
template <typename Visit> void for_each_part(common_json & schema, const std::string & path, const Visit & visit) {
    if (schema.contains("properties") && schema.at("properties").is_object()) {
        for (const auto & entry : schema.at("properties").items()) {
            visit(entry.value(), path + "/properties/" + escape_name(entry.key()));
        }
    }
    for (const char * key : {"additionalProperties", "unevaluatedProperties"}) {
        if (schema.contains(key) && schema.at(key).is_object()) {
            visit(schema.at(key), path + "/" + key);
        }
    }
    for (const char * key : {"items", "prefixItems", "anyOf", "oneOf", "allOf"}) {
        if (!schema.contains(key)) {
            continue;
        }
        common_json & value = schema.at(key);
        const std::string place = path + "/" + key;
        if (!value.is_array()) {
            visit(value, place);
            continue;
        }
        for (size_t i = 0; i < value.size(); ++i) {
            visit(value.at(i), place + "/" + std::to_string(i));
        }
    }
}

} // namespace s2moe
