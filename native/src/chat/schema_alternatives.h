// anyOf, oneOf and allOf.

#pragma once

#include <string>

#include "json.h"
#include "schema_refs.h"
#include "schema_report.h"

namespace s2moe {

// Throws failure if a value may have to be compared with too many schemas, or with one that is behind itself.
void check_alternatives(const common_json & schema,
                        const std::string & path,
                        schema_refs & refs,
                        const schema_report & report);

// llama.cpp has grammars for one of them that stands alone; it joins the parts of an allOf if they are objects with
// different properties.
void prepare_alternatives(common_json & schema, const std::string & path, schema_refs & refs, schema_report & report);

} // namespace s2moe
