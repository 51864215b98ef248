// What can be told of the values that match a schema, to see whether two schemas exclude each other.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "json.h"
#include "schema_refs.h"

namespace s2moe {

struct schema_outline {
    using value_list = std::vector<const common_json *>; // into the schema

    unsigned types = 0; // a bit for each type that may match
    std::optional<value_list> values;
    std::map<std::string, value_list> constants; // properties with few values
    std::set<std::string> properties;
    std::set<std::string> required;
    bool is_closed = false; // there are no other properties
};

// Of the schema behind a chain of references.
schema_outline outline_of(const common_json & schema, const schema_refs & refs, const std::string & path);

// Whether no value matches both, as far as types, constants and required properties show. Takes what it compares from
// `budget`; with none left, nothing is shown.
bool are_disjoint(const schema_outline & a, const schema_outline & b, int64_t & budget);

} // namespace s2moe
