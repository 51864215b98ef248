#include "schema_numbers.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

namespace s2moe {
namespace {

constexpr std::array value_limits = {"multipleOf", "minProperties", "maxProperties"};
constexpr std::array number_limits = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"};

// The value of a keyword that counts, or -1. One that a grammar cannot count is left out.
int64_t
count(common_json & schema, const std::string & path, const char * key, int64_t maximum, schema_report & report) {
    if (!schema.contains(key)) {
        return -1;
    }
    const common_json & value = schema.at(key);
    const double number = value.is_number() ? value.get<double>() : -1;
    if (number < 0 || number != std::floor(number)) {
        report.fail(path, std::string(key) + " must be a whole number from 0 on");
    }
    if (number > static_cast<double>(std::min(maximum, report.budget().repetitions))) {
        report.drop(schema, path, key);
        return -1;
    }
    const auto n = static_cast<int64_t>(number);
    report.budget().repetitions -= n;
    schema[key] = n; // 5.0 is a whole number here, but not there
    return n;
}

void integer_limits(common_json & schema, const std::string & path, schema_report & report) {
    for (const auto & [inclusive, exclusive] :
         {std::pair{"minimum", "exclusiveMinimum"}, std::pair{"maximum", "exclusiveMaximum"}}) {
        if (schema.contains(inclusive)) {
            report.note_if_present(schema, path, exclusive);
        }
    }
    const auto bound = [&](const char * key) { return schema.at(key).get<double>(); };
    const bool has_low = schema.contains("minimum") || schema.contains("exclusiveMinimum");
    const bool has_high = schema.contains("maximum") || schema.contains("exclusiveMaximum");
    // the converter writes up to 16 digits, and any number of them between two bounds
    const double largest = has_low && has_high ? 1e18 : 1e14;
    bool in_range = true;
    for (const char * key : number_limits) {
        in_range = in_range && (!schema.contains(key) || std::fabs(bound(key)) <= largest);
    }
    if (!in_range) {
        for (const char * key : number_limits) {
            if (schema.contains(key)) {
                report.drop(schema, path, key);
            }
        }
    } else if (has_low && has_high) {
        const double low =
            schema.contains("minimum") ? std::ceil(bound("minimum")) : std::floor(bound("exclusiveMinimum")) + 1;
        const double high =
            schema.contains("maximum") ? std::floor(bound("maximum")) : std::ceil(bound("exclusiveMaximum")) - 1;
        if (low > high) {
            report.fail(path, "no integer lies between the bounds");
        }
    }
}

} // namespace

void prepare_counts(common_json & schema,
                    const std::string & path,
                    const char * low,
                    const char * high,
                    int64_t maximum,
                    schema_report & report) {
    const int64_t least = count(schema, path, low, maximum, report);
    const int64_t most = count(schema, path, high, maximum, report);
    if (most >= 0 && least > most) {
        report.fail(path, std::string(low) + " is more than " + high);
    }
}

void prepare_limits(common_json & schema, const std::string & path, schema_report & report) {
    for (const char * key : value_limits) {
        report.note_if_present(schema, path, key);
    }
    bool is_integer = schema.contains("type") && schema.at("type") == "integer";
    if (schema.contains("type") && schema.at("type").is_array()) {
        for (const common_json & type : schema.at("type")) {
            is_integer = is_integer || type == "integer";
        }
    }
    for (const char * key : number_limits) {
        if (!is_integer) {
            report.note_if_present(schema, path, key);
        } else if (schema.contains(key) && !schema.at(key).is_number()) {
            report.drop(schema, path, key); // draft 4 has true and false here
        }
    }
    if (is_integer) {
        integer_limits(schema, path, report);
    }
}

} // namespace s2moe
