// JSON schemas of a client, before llama.cpp turns them into grammars: bounded, and nothing left out in silence.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "json.h"

namespace s2moe {

// What the schemas of one request may cost together.
struct schema_budget {
    int64_t repetitions = 100000;    // characters of strings and items of arrays that are counted: each is a rule
    int64_t optional_pairs = 200000; // of properties of one object that are not required: each costs a microsecond
    int64_t comparisons = 200000;    // of names and values, to tell the alternatives of a oneOf apart
};

// What becomes of a keyword that a grammar cannot hold.
enum class schema_strictness {
    lenient,  // it is left out
    decisive, // one that takes part in choosing what is valid is an error, limits of values are left out
    complete, // it is an error, but for the format of a string, which is an annotation
};

struct schema_options {
    std::string name; // what messages call the schema, e.g. "json_schema"
    schema_strictness strictness = schema_strictness::decisive;
    schema_budget & budget;
};

/*
 * Rewrites a schema so that llama.cpp makes a grammar of it that means the same, as far as grammars go. Checks depth
 * and size, since llama.cpp recurses without bounds.
 *
 * Returns what the grammar will not enforce, one text per keyword, with its place.
 *
 * Throws failure (S2MOE_ERROR_GRAMMAR) with the place: "<name> at #/properties/x: …".
 */
std::vector<std::string> prepare_schema(common_json & schema, const schema_options & options);

// A regular expression of JSON schema in the words that llama.cpp's converter knows, for text inside a JSON string;
// "" if there are none. The result is anchored.
std::string portable_pattern(const std::string & pattern);

} // namespace s2moe
