// JSON schemas of a client, before llama.cpp turns them into grammars: bounded, and nothing left out in silence.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "json.h"

namespace s2moe {

struct schema_options {
    std::string name; // what messages call the schema, e.g. "json_schema"
    // Whether a keyword that takes part in choosing what is valid, and that a grammar cannot hold, is an error. If not,
    // it is left out.
    bool strict = true;
    // How many repetitions (characters of strings, items of arrays) the schema may still count, all of it together;
    // each is a rule of the grammar. Shared by the tools of a request.
    int64_t & repetitions_left;
};

constexpr int64_t n_repetitions_max = 100000;

/*
 * Rewrites a schema so that llama.cpp makes a grammar of it that means the same, as far as grammars go. Checks depth
 * and size, since llama.cpp recurses without bounds.
 *
 * Returns what the grammar will not enforce, one text per keyword, with its place: bounds of numbers and the like,
 * which never are an error.
 *
 * Throws failure (S2MOE_ERROR_GRAMMAR) with the place: "<name> at #/properties/x: …".
 */
std::vector<std::string> prepare_schema(common_json & schema, const schema_options & options);

// A regular expression of JSON schema in the words that llama.cpp's converter knows, for text inside a JSON string;
// "" if there are none. The result is anchored.
std::string portable_pattern(const std::string & pattern);

} // namespace s2moe
