// Keywords of JSON schema that have numbers for values.

#pragma once

#include <cstdint>
#include <string>

#include "json.h"
#include "schema_report.h"

namespace s2moe {

// A pair of keywords that count, as minLength and maxLength. Those that a grammar cannot count are left out: above
// `maximum`, or beyond the budget.
void prepare_counts(common_json & schema,
                    const std::string & path,
                    const char * low,
                    const char * high,
                    int64_t maximum,
                    schema_report & report);

// Bounds of values. Grammars have them for integers, up to those of int64_t; for numbers they do not.
void prepare_limits(common_json & schema, const std::string & path, schema_report & report);

} // namespace s2moe
