// What is found in a schema on the way to its grammar.

#pragma once

#include <algorithm>
#include <map>
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
        throw failure(S2MOE_ERROR_GRAMMAR, options.name + " at " + place(path) + ": " + what);
    }

    // A keyword that takes part in deciding what is valid and cannot be kept.
    void lose(common_json & schema, const std::string & path, const char * key, const std::string & why) {
        if (!is_lenient()) {
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
        const bool is_limit = key != "format";
        if (is_limit && options.strictness == schema_strictness::complete) {
            fail(path, key + " cannot be enforced, but the schema is strict; leave it out, or ask without strict");
        }
        const std::string text = options.name + " at " + place(path) + ": " + key;
        // however many formats there are, one that is more is told
        const bool is_told = notes.size() < n_notes_max || (is_limit && !has_limits);
        if (is_told && std::find(notes.begin(), notes.end(), text) == notes.end()) {
            notes.push_back(text);
            has_limits = has_limits || is_limit;
        }
    }

    void note_if_present(const common_json & schema, const std::string & path, const char * key) {
        if (schema.contains(key)) {
            note(path, key);
        }
    }

    // A schema was copied: what is found in the copy is told of the place where the client wrote it.
    void add_copy(const std::string & path, const std::string & written_at) {
        copies[path] = written_at;
    }

    // Where the client wrote what stands at a path now.
    std::string place(const std::string & path) const {
        for (const auto & [copy, written_at] : copies) {
            if (path.rfind(copy, 0) == 0 && (path.size() == copy.size() || path[copy.size()] == '/')) {
                return written_at + path.substr(copy.size());
            }
        }
        return path;
    }

    bool is_lenient() const {
        return options.strictness == schema_strictness::lenient;
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
    std::map<std::string, std::string> copies;
    std::vector<std::string> notes;
    bool has_limits = false; // more than formats
};

} // namespace s2moe
