#include "schema_ref_spelling.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "schema_keywords.h"
#include "schema_pointer.h"

namespace s2moe {
namespace {

constexpr size_t ref_bytes_max = 300; // llama.cpp's regular expressions recurse over it
constexpr size_t name_bytes_max = 64;
constexpr size_t copied_bytes_max = 1 << 20; // targets may lie in each other, and would be copied for each level

bool is_index(const std::string & text, size_t size) {
    return !text.empty() && text.size() < 6 && text.find_first_not_of("0123456789") == std::string::npos &&
           std::to_string(std::stoul(text)) == text && std::stoul(text) < size;
}

struct target {
    common_json * schema = nullptr; // null: there is none
    bool is_schema = false;
};

target find_target(common_json & root, const std::vector<std::string> & names) {
    enum { at_schema, at_names, at_list, outside } state = at_schema;
    common_json * found = &root;
    for (const std::string & name : names) {
        common_json & here = *found;
        if (here.is_array() ? state == at_names || !is_index(name, here.size())
                            : !here.is_object() || !here.contains(name)) {
            return {};
        }
        found = here.is_array() ? &here.at(std::stoul(name)) : &here.at(name);
        if (state == at_names || state == at_list) {
            state = at_schema;
        } else if (name == "properties" || name == "$defs" || name == "definitions") {
            state = at_names;
        } else if (found->is_array()) {
            state = at_list;
        } else if (name != "items" && name != "additionalProperties") {
            state = outside; // such as #/components/schemas/…
        }
    }
    const bool is_schema = state == at_schema || state == outside;
    return {found, is_schema && (found->is_object() || found->is_boolean())};
}

// Whether llama.cpp can follow these names to a schema that is part of no other.
bool is_definition(const std::vector<std::string> & names) {
    return names.size() == 2 && (names[0] == "$defs" || names[0] == "definitions") && !names[1].empty() &&
           names[1].size() <= ref_bytes_max && names[1].find('/') == std::string::npos;
}

class ref_speller {
  public:
    ref_speller(common_json & root, schema_report & report) : root(root), original(root), report(report) {
        if (original.is_object() && original.contains("$id") && original.at("$id").is_string()) {
            base = original.at("$id").get<std::string>();
        }
        if (original.is_object() && original.contains("$defs") && original.at("$defs").is_object()) {
            for (const auto & entry : original.at("$defs").items()) {
                taken_names.insert(entry.key());
            }
        }
    }

    void run() {
        respell(root, "#", false);
        while (!waiting.empty()) {
            const auto [schema, path] = waiting.back();
            waiting.pop_back();
            respell(*schema, path, false);
        }
        attach_copies();
    }

  private:
    struct copy {
        std::string name; // in $defs
        common_json schema;
    };

    common_json & root;
    common_json original; // as the client wrote it: references in `root` change on the way
    schema_report & report;
    std::string base; // $id of the root
    std::set<std::string> visited;
    std::vector<std::pair<common_json *, std::string>> waiting; // schemas with their paths
    std::map<std::string, copy> copies;                         // by the path in the client's schema
    std::set<std::string> taken_names;
    size_t copied_bytes = 0;

    // Only strings change here, so that pointers to schemas stay good.
    void respell(common_json & schema, const std::string & path, bool has_base) {
        if (!schema.is_object() || !visited.insert(path).second) {
            return;
        }
        if (schema.contains("$ref")) {
            if (!schema.at("$ref").is_string()) {
                report.fail(path, "$ref must be a string");
            }
            if (has_base) {
                report.fail(path, "$ref below a schema with an $id of its own is not supported; leave that $id out");
            }
            schema["$ref"] = follow(schema.at("$ref").get<std::string>(), path);
            return;
        }
        if (path != "#" && schema.contains("$id") && schema.at("$id").is_string()) {
            has_base = has_base || schema.at("$id").get<std::string>().rfind('#', 0) != 0;
        }
        for_each_part(
            schema, path, [&](common_json & part, const std::string & place) { respell(part, place, has_base); });
    }

    std::string follow(const std::string & ref, const std::string & path) {
        const std::string shown = "$ref " + ref.substr(0, 80);
        const auto names = read_pointer(without_base(ref));
        if (!names) {
            report.fail(path, shown + " is not supported; write the way from the root of this schema, as #/$defs/name");
        }
        const target found = find_target(root, *names);
        if (found.schema == nullptr) {
            report.fail(path, shown + " leads nowhere");
        }
        if (!found.is_schema) {
            report.fail(path, shown + " leads to what is no schema");
        }
        if (!is_definition(*names)) {
            return "#/$defs/" + copy_of(*names, path).name;
        }
        waiting.emplace_back(found.schema, pointer_to(*names));
        return "#/" + names->front() + "/" + names->back();
    }

    // A reference by the root's own $id stays in this document.
    std::string without_base(const std::string & ref) const {
        if (base.empty() || ref.rfind(base, 0) != 0) {
            return ref;
        }
        const std::string fragment = ref.substr(base.size());
        return fragment.empty() ? "#" : fragment[0] == '#' ? fragment : ref;
    }

    const copy & copy_of(const std::vector<std::string> & names, const std::string & path) {
        const auto [entry, is_new] = copies.try_emplace(pointer_to(names));
        copy & out = entry->second;
        if (!is_new) {
            return out;
        }
        out.name = free_name(names);
        out.schema = *find_target(original, names).schema;
        if (names.empty()) {
            for (const char * key : {"$defs", "definitions", "$id", "$schema"}) {
                out.schema.erase(key);
            }
        }
        copied_bytes += out.schema.dump_safe().size();
        if (copied_bytes > copied_bytes_max) {
            report.fail(path, "$ref leads into too large a part of the schema; move that part into $defs");
        }
        const std::string copied_to = "#/$defs/" + escape_name(out.name);
        report.add_copy(copied_to, entry->first);
        waiting.emplace_back(&out.schema, copied_to);
        return out;
    }

    std::string free_name(const std::vector<std::string> & names) {
        std::string stem = names.empty() ? "root" : names.back();
        std::replace(stem.begin(), stem.end(), '/', '-');
        if (stem.empty() || stem.size() > name_bytes_max) {
            stem = "schema";
        }
        std::string name = stem;
        for (int i = 2; !taken_names.insert(name).second; ++i) {
            name = stem + "-" + std::to_string(i);
        }
        return name;
    }

    void attach_copies() {
        if (copies.empty()) {
            return;
        }
        common_json & definitions = root["$defs"];
        if (!definitions.is_null() && !definitions.is_object()) {
            report.fail("#", "$defs must be an object");
        }
        for (auto & [place, copy] : copies) {
            definitions[copy.name] = std::move(copy.schema);
        }
    }
};

} // namespace

void spell_refs(common_json & root, schema_report & report) {
    ref_speller(root, report).run();
}

} // namespace s2moe
