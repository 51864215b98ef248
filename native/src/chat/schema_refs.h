// References of a JSON schema into itself, as spell_refs() left them.

#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <string>

#include "json.h"
#include "schema_report.h"

namespace s2moe {

constexpr int schema_depth_max = 48; // levels of schemas

class schema_refs {
  public:
    schema_refs(common_json & root, const schema_report & report) : root(root), report(report) {
    }

    // The schema that `ref`, in the schema at `path`, leads to.
    common_json & resolve(const std::string & ref, const std::string & path) const;

    // The path of that schema: the one that a walk from the root gives it.
    static std::string path_of(const std::string & ref);

    // The schema behind a chain of references; `schema` itself if it is none.
    const common_json & resolve_chain(const common_json & schema, const std::string & path) const;

    static constexpr size_t n_alternatives_max = 4096;

    // How many schemas one value may have to be compared with, at most n_alternatives_max + 1. llama.cpp walks over
    // all of them and does not remember where it was. Throws failure if one of them is behind itself.
    size_t count_alternatives(const common_json & schema, const std::string & path, int depth = 0);

  private:
    common_json & root;
    const schema_report & report;
    std::map<std::string, size_t> counted;
    std::set<std::string> open;
};

} // namespace s2moe
