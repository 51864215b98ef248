#include "schema.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <set>
#include <string_view>

#include "error.h"
#include "grammar_text.h"
#include "json-schema-to-grammar.h"
#include "schema_numbers.h"
#include "schema_refs.h"
#include "schema_report.h"

namespace s2moe {
namespace {

constexpr size_t n_nodes_max = 10000;  // schemas inside schemas
constexpr size_t n_optional_max = 200; // properties of one object
constexpr size_t name_bytes_max = 200; // the converter's regular expressions recurse over a name
constexpr size_t pattern_bytes_max = 1024;
constexpr int64_t n_characters_max = 2000; // llama.cpp's grammars count so far
constexpr int64_t n_items_max = 500;

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
constexpr std::array combinations = {"anyOf", "oneOf", "allOf"};
constexpr std::array known_formats = {"date", "time", "date-time", "uuid", "uuid1", "uuid2", "uuid3", "uuid4", "uuid5"};

bool is_annotation(const std::string & key) {
    constexpr std::array known = {
        "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "nullable"};
    return key.empty() || key[0] == '$' || key == "definitions" || key.rfind("x-", 0) == 0 ||
           std::find(known.begin(), known.end(), key) != known.end();
}

bool has(const common_json & schema, const char * key) {
    return schema.contains(key);
}

// A name as part of a JSON pointer.
std::string escaped(const std::string & name) {
    std::string out;
    for (const char c : name) {
        out += c == '~' ? "~0" : c == '/' ? "~1" : std::string(1, c);
    }
    return out;
}

class preparation {
  public:
    preparation(common_json & root, const schema_options & options)
        : root(root), report(options), refs(root, options.name) {
    }

    std::vector<std::string> run() {
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
        if (root.is_object() && has(root, "$ref")) {
            const common_json target = refs.resolve_chain(root, "#");
            if (!target.is_object()) {
                report.fail("#", "must be an object");
            }
            root.erase("$ref");
            for (const auto & entry : target.items()) {
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
            if (has(schema, key)) {
                report.lose(schema, path, key, "cannot be written as a grammar");
            }
        }
        combination(schema, path);
        types(schema, path);
        text(schema, path);
        array(schema, path);
        object(schema, path);
        prepare_limits(schema, path, report);
        descend(schema, path, depth);
    }

    void check_alternatives(const common_json & schema, const std::string & path) {
        if (refs.count_alternatives(schema, path) > schema_refs::n_alternatives_max) {
            report.fail(path, "has more than " + std::to_string(schema_refs::n_alternatives_max) + " alternatives");
        }
    }

    void reference(const common_json & schema, const std::string & path, int depth) {
        refs.resolve_chain(schema, path);
        for (const auto & entry : schema.items()) {
            if (is_annotation(entry.key())) {
                continue;
            }
            if (report.is_strict()) {
                report.fail(path, entry.key() + " beside $ref cannot be written as a grammar");
            }
            report.note(path, entry.key());
        }
        check_alternatives(schema, path);
        const std::string ref = schema.at("$ref").get<std::string>();
        node(refs.resolve(ref, path), ref, depth + 1);
    }

    void combination(common_json & schema, const std::string & path) {
        for (const char * key : combinations) {
            if (has(schema, key) && (!schema.at(key).is_array() || schema.at(key).empty())) {
                report.fail(path, std::string(key) + " must be a list of schemas");
            }
        }
        for (const char * key : combinations) {
            if (!has(schema, key)) {
                continue;
            }
            bool is_all = true; // nothing stands beside it that says what is valid
            for (const auto & entry : schema.items()) {
                const bool is_type = entry.key() == "type" && entry.value().is_string();
                is_all = is_all && (entry.key() == key || is_type || is_annotation(entry.key()));
            }
            if (!is_all) {
                report.lose(schema, path, key, "beside other keywords cannot be written as a grammar");
            } else if (std::string_view(key) == "allOf" && !only_part(schema, path) && !can_be_merged(schema, path)) {
                report.lose(schema, path, key, "of more than objects with properties cannot be written as a grammar");
            }
        }
        check_alternatives(schema, path);
    }

    // allOf with one part is that part.
    bool only_part(common_json & schema, const std::string & path) {
        if (schema.at("allOf").size() != 1) {
            return false;
        }
        const common_json part = schema.at("allOf").at(size_t{0});
        if (!part.is_object()) {
            report.fail(path + "/allOf/0", "must be an object");
        }
        schema.erase("allOf");
        schema.set({"anyOf", common_json::array({part})});
        return true;
    }

    bool can_be_merged(const common_json & schema, const std::string & path) const {
        for (const common_json & part : schema.at("allOf")) {
            const common_json & target = refs.resolve_chain(part, path);
            if (!target.is_object() || !has(target, "properties")) {
                return false;
            }
            for (const char * key : combinations) {
                if (has(target, key)) {
                    return false;
                }
            }
        }
        return true;
    }

    void types(const common_json & schema, const std::string & path) const {
        if (!has(schema, "type") || !schema.at("type").is_array()) {
            return;
        }
        std::set<std::string> names;
        for (const common_json & type : schema.at("type")) {
            if (!type.is_string() || !names.insert(type.get<std::string>()).second) {
                report.fail(path, "type must be a list of different names");
            }
        }
    }

    void text(common_json & schema, const std::string & path) {
        bool has_format = false;
        if (has(schema, "format") && schema.at("format").is_string()) {
            const std::string format = schema.at("format").get<std::string>();
            has_format = std::find(known_formats.begin(), known_formats.end(), format) != known_formats.end();
            if (!has_format) {
                report.note(path, "format");
            }
        }
        prepare_counts(schema, path, "minLength", "maxLength", n_characters_max, report);
        if (has(schema, "pattern")) {
            pattern(schema, path);
        }
        if (has(schema, "pattern") || has_format) {
            report.note_if_present(schema, path, "minLength");
            report.note_if_present(schema, path, "maxLength");
        }
    }

    void pattern(common_json & schema, const std::string & path) {
        if (!schema.at("pattern").is_string()) {
            report.fail(path, "pattern must be a string");
        }
        const std::string source = schema.at("pattern").get<std::string>();
        const std::string portable = source.size() > pattern_bytes_max ? "" : portable_pattern(source);
        std::string why = "it uses what grammars do not know";
        bool works = false;
        if (!portable.empty()) {
            try {
                const common_json alone{{"type", "string"}, {"pattern", portable}};
                check_generated_grammar(json_schema_to_grammar(alone), "");
                works = true;
            } catch (const std::exception & e) {
                why = e.what();
            }
        }
        if (!works) {
            report.lose(schema, path, "pattern", source.substr(0, 80) + " is not supported: " + why.substr(0, 200));
        } else if (portable != source) {
            schema["pattern"] = portable;
        }
    }

    void array(common_json & schema, const std::string & path) {
        prepare_counts(schema, path, "minItems", "maxItems", n_items_max, report);
        if (has(schema, "prefixItems") && has(schema, "items")) {
            if (schema.at("items").is_boolean()) {
                schema.erase("items");
            } else {
                report.lose(schema, path, "items", "beside prefixItems cannot be written as a grammar");
            }
        }
        const char * list = has(schema, "items") ? "items" : "prefixItems";
        if (has(schema, list) && schema.at(list).is_array()) {
            if (schema.at(list).empty()) {
                report.fail(path, std::string(list) + " must not be empty");
            }
            for (const char * key : {"minItems", "maxItems"}) {
                if (has(schema, key) && schema.at(key).get<int64_t>() != static_cast<int64_t>(schema.at(list).size())) {
                    report.note(path, key);
                }
            }
        }
        if (has(schema, "uniqueItems") && schema.at("uniqueItems") != false) {
            report.note(path, "uniqueItems");
        }
    }

    void object(common_json & schema, const std::string & path) {
        if (has(schema, "properties") && !schema.at("properties").is_object()) {
            report.fail(path, "properties must be an object");
        }
        std::set<std::string> required;
        if (has(schema, "required") && schema.at("required").is_array()) {
            for (const common_json & name : schema.at("required")) {
                if (!name.is_string()) {
                    report.fail(path, "required must be a list of names");
                }
                required.insert(name.get<std::string>());
            }
        }
        size_t n_optional = 0;
        if (has(schema, "properties")) {
            for (const auto & entry : schema.at("properties").items()) {
                if (entry.key().size() > name_bytes_max) {
                    report.fail(path, "a property's name is longer than " + std::to_string(name_bytes_max) + " bytes");
                }
                n_optional += required.erase(entry.key()) == 0;
            }
        }
        if (n_optional > n_optional_max) {
            report.fail(path, "has more than " + std::to_string(n_optional_max) + " properties that are not required");
        }
        report.budget().optional_pairs -= static_cast<int64_t>(n_optional * n_optional);
        if (report.budget().optional_pairs < 0) {
            report.fail(path, "there are too many objects with many properties that are not required");
        }
        if (!required.empty()) {
            if (report.is_strict()) {
                report.fail(path, "required names " + *required.begin() + ", which is not among the properties");
            }
            report.note(path, "required");
        }
    }

    void descend(common_json & schema, const std::string & path, int depth) {
        if (has(schema, "properties")) {
            for (const auto & entry : schema.at("properties").items()) {
                node(entry.value(), path + "/properties/" + escaped(entry.key()), depth + 1);
            }
        }
        if (has(schema, "additionalProperties") && schema.at("additionalProperties").is_object()) {
            node(schema.at("additionalProperties"), path + "/additionalProperties", depth + 1);
        }
        for (const char * key : {"items", "prefixItems", "anyOf", "oneOf", "allOf"}) {
            if (!has(schema, key)) {
                continue;
            }
            common_json & value = schema.at(key);
            const std::string place = path + "/" + key;
            if (!value.is_array()) {
                node(value, place, depth + 1);
                continue;
            }
            for (size_t i = 0; i < value.size(); ++i) {
                node(value.at(i), place + "/" + std::to_string(i), depth + 1);
            }
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
