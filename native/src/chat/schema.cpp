#include "schema.h"

#include <array>
#include <set>
#include <string_view>

#include "error.h"
#include "grammar_text.h"
#include "json-schema-to-grammar.h"
#include "schema_alternatives.h"
#include "schema_arrays.h"
#include "schema_keywords.h"
#include "schema_numbers.h"
#include "schema_objects.h"
#include "schema_ref_spelling.h"
#include "schema_refs.h"
#include "schema_report.h"
#include "schema_strings.h"
#include "schema_values.h"

namespace s2moe {
namespace {

constexpr size_t n_nodes_max = 10000; // schemas inside schemas

// They decide what is valid, and a grammar has nothing like them.
constexpr std::array structural = {"not",
                                   "if",
                                   "then",
                                   "else",
                                   "patternProperties",
                                   "propertyNames",
                                   "dependentSchemas",
                                   "dependentRequired",
                                   "dependencies",
                                   "contains",
                                   "unevaluatedItems",
                                   "$dynamicRef",
                                   "$recursiveRef"};

bool has(const common_json & schema, const char * key) {
    return schema.contains(key);
}

// Whether a structural keyword demands what is true of any value. Generators write some of these.
bool demands_nothing(const common_json & schema, std::string_view key) {
    const common_json & value = schema.at(std::string(key));
    const bool is_any = value == true || (value.is_object() && value.empty());
    if (key == "propertyNames") {
        return is_any || (value.is_object() && value.size() == 1 && has(value, "type") && value.at("type") == "string");
    }
    return is_any && (key == "patternProperties" || key == "dependentSchemas" || key == "dependentRequired" ||
                      key == "dependencies" || key == "unevaluatedItems");
}

class preparation {
  public:
    preparation(common_json & root, const schema_options & options) : root(root), report(options), refs(root, report) {
    }

    std::vector<std::string> run() {
        spell_refs(root, report);
        inline_root();
        node(root, "#", 0);
        return report.unenforced();
    }

  private:
    common_json & root;
    schema_report report;
    schema_refs refs;
    std::set<std::string> seen; // paths; a schema that is reached twice is changed once, since changes move members

    // Parsers of tool calls look for properties at the root.
    void inline_root() {
        if (!root.is_object() || !has(root, "$ref")) {
            return;
        }
        const common_json target = refs.resolve_chain(root, "#");
        if (!target.is_object()) {
            report.fail("#", "must be an object");
        }
        refuse_beside_ref(root, "#");
        for (const std::string & key : keywords_of(root)) {
            root.erase(key);
        }
        root.erase("$ref");
        for (const auto & entry : target.items()) {
            if (!root.contains(entry.key())) {
                root.set({entry.key(), entry.value()});
            }
        }
    }

    void node(common_json & schema, const std::string & path, int depth) {
        if (!seen.insert(path).second) {
            return;
        }
        if (schema.is_boolean() && schema.get<bool>()) {
            schema = common_json::object();
        }
        if (schema.is_boolean()) {
            report.fail(path, "false, which nothing matches, cannot be written as a grammar");
        }
        if (!schema.is_object()) {
            report.fail(path, "must be an object");
        }
        if (seen.size() > n_nodes_max) {
            report.fail("#", "is larger than " + std::to_string(n_nodes_max) + " schemas");
        }
        if (depth > schema_depth_max) {
            report.fail(path, "is nested deeper than " + std::to_string(schema_depth_max) + " schemas");
        }
        if (has(schema, "$ref")) {
            reference(schema, path, depth);
            return;
        }
        // all changes of this object come first: they move its members
        for (const char * key : structural) {
            if (has(schema, key) && !demands_nothing(schema, key)) {
                report.lose(schema, path, key, "cannot be written as a grammar");
            }
        }
        check_type(schema, path, report);
        prepare_alternatives(schema, path, refs, report);
        prepare_values(schema, path, report);
        prepare_string(schema, path, report);
        prepare_array(schema, path, report);
        prepare_object(schema, path, report);
        prepare_limits(schema, path, report);
        for_each_part(
            schema, path, [&](common_json & part, const std::string & place) { node(part, place, depth + 1); });
    }

    void reference(const common_json & schema, const std::string & path, int depth) {
        refuse_beside_ref(schema, path);
        check_alternatives(schema, path, refs, report);
        const std::string ref = schema.at("$ref").get<std::string>();
        node(refs.resolve(ref, path), schema_refs::path_of(ref), depth + 1);
    }

    // What decides what is valid, but for $ref.
    static std::vector<std::string> keywords_of(const common_json & schema) {
        std::vector<std::string> keys;
        for (const auto & entry : schema.items()) {
            if (!is_annotation(entry.key())) {
                keys.push_back(entry.key());
            }
        }
        return keys;
    }

    // llama.cpp passes over them, so they may only repeat what the target says.
    void refuse_beside_ref(const common_json & schema, const std::string & path) {
        const common_json & target = refs.resolve_chain(schema, path);
        for (const std::string & key : keywords_of(schema)) {
            if (target.is_object() && target.contains(key) && schema.at(key) == common_json_value(target.at(key))) {
                continue;
            }
            if (!report.is_lenient()) {
                report.fail(path, key + " beside $ref cannot be written as a grammar");
            }
            report.note(path, key);
        }
    }
};

} // namespace

std::vector<std::string> prepare_schema(common_json & schema, const schema_options & options) {
    std::vector<std::string> unenforced = preparation(schema, options).run();
    try {
        check_generated_grammar(json_schema_to_grammar(schema), options.name);
    } catch (const failure &) {
        throw;
    } catch (const std::exception & e) {
        throw failure(S2MOE_ERROR_GRAMMAR, options.name + ": " + std::string(e.what()).substr(0, 300));
    }
    return unenforced;
}

} // namespace s2moe
