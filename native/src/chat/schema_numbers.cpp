#include "schema_numbers.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>

#include "schema_keywords.h"

namespace s2moe {
namespace {

constexpr std::array number_limits = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"};
// Of an integer that a grammar is made for, both ways: llama.cpp takes the ends of int64_t for "no bound".
constexpr int64_t largest_integer = std::numeric_limits<int64_t>::max() - 1;

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

// A pair of bounds in one direction.
struct bound_keys {
    const char * inclusive;
    const char * exclusive;
    int sign; // 1: from below
};
constexpr bound_keys lower = {"minimum", "exclusiveMinimum", 1};
constexpr bound_keys upper = {"maximum", "exclusiveMaximum", -1};

// The outermost integer within a bound; nothing if the bound lets all through that a grammar is made for.
std::optional<int64_t> read_bound(common_json & schema,
                                  const std::string & path,
                                  const char * key,
                                  bool is_exclusive,
                                  int sign,
                                  schema_report & report) {
    const common_json & value = schema.at(key);
    const double number = value.get<double>();
    // what is beyond int64_t has wrapped around
    const bool is_integer = value.is_number_integer() && (value.get<int64_t>() < 0) == (number < 0);
    const bool is_beyond = !is_integer && std::fabs(number) >= 0x1p63;
    int64_t bound = 0;
    if (!is_beyond) {
        bound =
            is_integer ? value.get<int64_t>() : static_cast<int64_t>(sign > 0 ? std::ceil(number) : std::floor(number));
    }
    const bool is_out = is_beyond || bound > largest_integer || bound < -largest_integer;
    if (is_out && number * sign < 0) {
        return std::nullopt;
    }
    const bool is_next = is_exclusive && (is_integer || static_cast<double>(bound) == number);
    if (is_out || (is_next && bound * sign == largest_integer)) {
        report.lose(schema,
                    path,
                    key,
                    "leaves none of the integers that a grammar is made for, " + std::to_string(-largest_integer) +
                        " to " + std::to_string(largest_integer));
        return std::nullopt;
    }
    return is_next ? bound + sign : bound;
}

// Replaces a pair by its inclusive bound.
std::optional<int64_t>
join_bounds(common_json & schema, const std::string & path, const bound_keys & keys, schema_report & report) {
    bool is_exclusive = false; // in draft 4, a truth value beside the inclusive bound
    if (schema.contains(keys.exclusive) && schema.at(keys.exclusive).is_boolean()) {
        is_exclusive = schema.at(keys.exclusive).get<bool>();
        schema.erase(keys.exclusive);
    }
    std::optional<int64_t> bound;
    for (const char * key : {keys.inclusive, keys.exclusive}) {
        if (!schema.contains(key)) {
            continue;
        }
        if (!schema.at(key).is_number()) {
            report.fail(path, std::string(key) + " must be a number");
        }
        const bool is_outside = key == keys.exclusive || is_exclusive;
        const auto other = read_bound(schema, path, key, is_outside, keys.sign, report);
        if (other && (!bound || (keys.sign > 0 ? *other > *bound : *other < *bound))) {
            bound = other;
        }
        schema.erase(key);
    }
    return bound;
}

void integer_limits(common_json & schema, const std::string & path, schema_report & report) {
    const auto low = join_bounds(schema, path, lower, report);
    const auto high = join_bounds(schema, path, upper, report);
    if (low && high && *low > *high) {
        report.fail(path, "no integer lies between the bounds");
    }
    if (low) {
        schema["minimum"] = *low;
    }
    if (high) {
        schema["maximum"] = *high;
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
    const bool may_be_integer = schema.contains("type") && allows_type(schema, "integer");
    if (!may_be_integer && !allows_type(schema, "number")) {
        return;
    }
    report.note_if_present(schema, path, "multipleOf");
    if (allows_type(schema, "number")) {
        for (const char * key : number_limits) {
            report.note_if_present(schema, path, key);
        }
    }
    if (may_be_integer) {
        integer_limits(schema, path, report);
    }
}

} // namespace s2moe
