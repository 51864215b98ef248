// type, enum and const.

#pragma once

#include <string>

#include "json.h"
#include "schema_report.h"

namespace s2moe {

void check_type(common_json & schema, const std::string & path, const schema_report & report);

// Where a schema lists its values, llama.cpp looks at nothing else: those of another type are taken out.
void prepare_values(common_json & schema, const std::string & path, schema_report & report);

} // namespace s2moe
