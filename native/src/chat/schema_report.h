// What is found in a schema on the way to its grammar.

#pragma once

#include <string>
#include <vector>

#include "error.h"
#include "schema.h"

namespace s2moe {

class schema_report {
  public:
    explicit schema_report(const schema_options & options) : options(options) {
    }

    [[noreturn]] void fail(const std::string & path, const std::string & what) const {
        throw failure(S2MOE_ERROR_GRAMMAR, options.name + " at " + path + ": " + what);
    }

    // A keyword that takes part in deciding what is valid and cannot be kept.
    void lose(common_json & schema, const std::string & path, const char * key, const std::string & why) {
        if (options.strict) {
            fail(path, std::string(key) + " " + why);
        }
        drop(schema, path, key);
    }

    // One that the converter would refuse, or take for something else, and that is left out wherever it stands.
    void drop(common_json & schema, const std::string & path, const char * key) {
        note(path, key);
        schema.erase(key);
    }

    // One that the converter passes over.
    void note(const std::string & path, const std::string & key) {
        if (notes.size() < n_notes_max) {
            notes.push_back(options.name + " at " + path + ": " + key);
        }
    }

    void note_if_present(const common_json & schema, const std::string & path, const char * key) {
        if (schema.contains(key)) {
            note(path, key);
        }
    }

    bool is_strict() const {
        return options.strict;
    }
    schema_budget & budget() {
        return options.budget;
    }
    const std::vector<std::string> & unenforced() const {
        return notes;
    }

  private:
    static constexpr size_t n_notes_max = 100;

    const schema_options & options;
    std::vector<std::string> notes;
};

} // namespace s2moe
