#include "schema_strings.h"

#include <algorithm>
#include <array>
#include <exception>

#include "grammar_text.h"
#include "json-schema-to-grammar.h"
#include "schema_keywords.h"
#include "schema_numbers.h"

namespace s2moe {
namespace {

constexpr size_t pattern_bytes_max = 1024;
constexpr int64_t n_characters_max = 2000; // llama.cpp's grammars count so far
constexpr std::array known_formats = {"date", "time", "date-time", "uuid", "uuid1", "uuid2", "uuid3", "uuid4", "uuid5"};

void prepare_pattern(common_json & schema, const std::string & path, schema_report & report) {
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

} // namespace

void prepare_string(common_json & schema, const std::string & path, schema_report & report) {
    if (!allows_type(schema, "string")) {
        return;
    }
    bool has_format = false;
    if (schema.contains("format")) {
        if (!schema.at("format").is_string()) {
            report.fail(path, "format must be a string");
        }
        const std::string format = schema.at("format").get<std::string>();
        has_format = std::find(known_formats.begin(), known_formats.end(), format) != known_formats.end();
        if (!has_format) {
            report.note(path, "format");
        }
    }
    prepare_counts(schema, path, "minLength", "maxLength", n_characters_max, report);
    if (schema.contains("pattern")) {
        prepare_pattern(schema, path, report);
    }
    if (schema.contains("pattern") && has_format) {
        report.note(path, "format beside pattern");
    }
    if (schema.contains("pattern") || has_format) {
        report.note_if_present(schema, path, "minLength");
        report.note_if_present(schema, path, "maxLength");
    }
}

} // namespace s2moe
