#include "schema_keywords.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace s2moe {

bool is_annotation(const std::string & key) {
    constexpr std::array known = {
        "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "nullable"};
    return key.empty() || key[0] == '$' || key == "definitions" || key.rfind("x-", 0) == 0 ||
           std::find(known.begin(), known.end(), key) != known.end();
}

bool allows_type(const common_json & schema, std::string_view type) {
    if (!schema.contains("type")) {
        return true;
    }
    const common_json & types = schema.at("type");
    if (!types.is_array()) {
        return types == type;
    }
    return std::any_of(types.begin(), types.end(), [&](const common_json & each) { return each == type; });
}

std::string_view type_of(const common_json & value) {
    if (value.is_number()) {
        const double number = value.get<double>();
        return number == std::floor(number) ? "integer" : "number";
    }
    return value.is_null()      ? "null"
           : value.is_boolean() ? "boolean"
           : value.is_string()  ? "string"
           : value.is_array()   ? "array"
                                : "object";
}

} // namespace s2moe
