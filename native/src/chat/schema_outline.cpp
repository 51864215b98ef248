#include "schema_outline.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "schema_keywords.h"

namespace s2moe {
namespace {

// Integers are numbers, too.
constexpr std::array<std::pair<const char *, unsigned>, 7> type_bits = {
    {{"null", 1}, {"boolean", 2}, {"integer", 4}, {"number", 4 + 8}, {"string", 16}, {"array", 32}, {"object", 64}}};
constexpr unsigned object_bit = 64;

std::optional<schema_outline::value_list> values_of(const common_json & schema) {
    if (!schema.is_object()) {
        return std::nullopt;
    }
    if (schema.contains("const")) {
        return schema_outline::value_list{&schema.at("const")};
    }
    if (!schema.contains("enum") || !schema.at("enum").is_array()) {
        return std::nullopt;
    }
    schema_outline::value_list values;
    for (const common_json & value : schema.at("enum")) {
        values.push_back(&value);
    }
    return values;
}

unsigned types_of(const common_json & schema, const std::optional<schema_outline::value_list> & values) {
    unsigned types = 0;
    for (const auto & [type, bits] : type_bits) {
        const auto is_this = [&, name = std::string_view(type)](const common_json * value) {
            return type_of(*value) == name;
        };
        const bool may_be = !values || std::any_of(values->begin(), values->end(), is_this);
        types |= may_be && allows_type(schema, type) ? bits : 0;
    }
    return types;
}

// Whether no value is in both lists.
bool have_none_in_common(const schema_outline::value_list & a, const schema_outline::value_list & b, int64_t & budget) {
    budget -= static_cast<int64_t>(a.size() * b.size());
    return budget >= 0 && std::none_of(a.begin(), a.end(), [&](const common_json * value) {
               return std::any_of(
                   b.begin(), b.end(), [&](const common_json * other) { return *value == common_json_value(*other); });
           });
}

// Whether a property has other values in `a` than in `b`, and one of them demands it.
bool differ_in_a_constant(const schema_outline & a, const schema_outline & b, int64_t & budget) {
    budget -= static_cast<int64_t>(a.constants.size());
    return budget >= 0 && std::any_of(a.constants.begin(), a.constants.end(), [&](const auto & constant) {
               const auto other = b.constants.find(constant.first);
               return other != b.constants.end() &&
                      (a.required.count(constant.first) != 0 || b.required.count(constant.first) != 0) &&
                      have_none_in_common(constant.second, other->second, budget);
           });
}

// Whether `a` demands a property that `b` excludes.
bool demands_what_is_excluded(const schema_outline & a, const schema_outline & b, int64_t & budget) {
    budget -= static_cast<int64_t>(a.required.size());
    return budget >= 0 && b.is_closed && std::any_of(a.required.begin(), a.required.end(), [&](const auto & name) {
               return b.properties.count(name) == 0;
           });
}

} // namespace

schema_outline outline_of(const common_json & schema, const schema_refs & refs, const std::string & path) {
    const common_json & target = refs.resolve_chain(schema, path);
    schema_outline out;
    if (!target.is_object()) {
        out.types = ~0U;
        return out;
    }
    out.values = values_of(target);
    out.types = types_of(target, out.values);
    if (target.contains("properties") && target.at("properties").is_object()) {
        for (const auto & entry : target.at("properties").items()) {
            out.properties.insert(entry.key());
            if (auto values = values_of(refs.resolve_chain(entry.value(), path))) {
                out.constants[entry.key()] = *std::move(values);
            }
        }
    }
    if (target.contains("required") && target.at("required").is_array()) {
        for (const common_json & name : target.at("required")) {
            if (name.is_string()) {
                out.required.insert(name.get<std::string>());
            }
        }
    }
    out.is_closed = target.contains("additionalProperties") && target.at("additionalProperties") == false &&
                    !target.contains("patternProperties");
    return out;
}

bool are_disjoint(const schema_outline & a, const schema_outline & b, int64_t & budget) {
    const unsigned common_types = a.types & b.types;
    if (common_types == 0 || (a.values && b.values && have_none_in_common(*a.values, *b.values, budget))) {
        return true;
    }
    return common_types == object_bit &&
           (differ_in_a_constant(a, b, budget) || demands_what_is_excluded(a, b, budget) ||
            demands_what_is_excluded(b, a, budget));
}

} // namespace s2moe
