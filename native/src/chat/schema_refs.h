// References of a JSON schema into itself.

#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <string>

#include "json.h"

namespace s2moe {

constexpr int schema_depth_max = 48; // levels of schemas

class schema_refs {
  public:
    // `name` begins error messages.
    schema_refs(common_json & root, const std::string & name) : root(root), name(name) {
    }

    // The schema that `ref`, in the schema at `path`, leads to. Only schemas can be referred to, not the objects that
    // hold them, and each has one spelling: the path that a walk from the root gives it.
    common_json & resolve(const std::string & ref, const std::string & path) const;

    // The schema behind a chain of references; `schema` itself if it is none.
    const common_json & resolve_chain(const common_json & schema, const std::string & path) const;

    static constexpr size_t n_alternatives_max = 4096;

    // How many schemas one value may have to be compared with, at most n_alternatives_max + 1. llama.cpp walks over
    // all of them and does not remember where it was.
    size_t count_alternatives(const common_json & schema, const std::string & path, int depth = 0);

    [[noreturn]] void fail(const std::string & path, const std::string & what) const;

  private:
    common_json & root;
    const std::string & name;
    std::map<std::string, size_t> counted;
    std::set<std::string> open;
};

} // namespace s2moe
