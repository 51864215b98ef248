#include "schema_arrays.h"

#include "schema_keywords.h"
#include "schema_numbers.h"

namespace s2moe {
namespace {

constexpr int64_t n_items_max = 500;

// Where each item has a schema of its own, there are exactly as many.
void check_length(common_json & schema, const std::string & path, const char * list, schema_report & report) {
    const auto n_items = static_cast<int64_t>(schema.at(list).size());
    if (n_items == 0) {
        report.fail(path, std::string(list) + " must not be empty");
    }
    const std::string why =
        "does not fit the " + std::to_string(n_items) + " items of " + list + ": a grammar has all of them and no more";
    if (schema.contains("minItems") && schema.at("minItems").get<int64_t>() > n_items) {
        report.lose(schema, path, "minItems", why);
    }
    if (schema.contains("maxItems") && schema.at("maxItems").get<int64_t>() < n_items) {
        report.lose(schema, path, "maxItems", why);
    }
}

} // namespace

void prepare_array(common_json & schema, const std::string & path, schema_report & report) {
    if (!allows_type(schema, "array")) {
        return;
    }
    prepare_counts(schema, path, "minItems", "maxItems", n_items_max, report);
    if (schema.contains("prefixItems") && !schema.at("prefixItems").is_array()) {
        report.fail(path, "prefixItems must be a list of schemas");
    }
    if (schema.contains("prefixItems") && schema.contains("items")) {
        if (schema.at("items").is_boolean()) {
            schema.erase("items");
        } else {
            report.lose(schema, path, "items", "beside prefixItems cannot be written as a grammar");
        }
    }
    const bool has_items = schema.contains("items") || schema.contains("prefixItems");
    const char * list = schema.contains("items") ? "items" : "prefixItems";
    if (has_items && schema.at(list).is_array()) {
        check_length(schema, path, list, report);
    }
    if (!has_items && !schema.contains("type")) { // llama.cpp makes any value of it
        report.note_if_present(schema, path, "minItems");
        report.note_if_present(schema, path, "maxItems");
    }
    if (schema.contains("uniqueItems") && schema.at("uniqueItems") != false) {
        report.note(path, "uniqueItems");
    }
}

} // namespace s2moe
