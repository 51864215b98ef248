// Keywords of JSON schema about strings.

#pragma once

#include <string>

#include "json.h"
#include "schema_report.h"

namespace s2moe {

// llama.cpp looks at one of pattern, format and lengths, in this order.
void prepare_string(common_json & schema, const std::string & path, schema_report & report);

} // namespace s2moe
