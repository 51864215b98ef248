// Keywords of JSON schema about arrays.

#pragma once

#include <string>

#include "json.h"
#include "schema_report.h"

namespace s2moe {

// llama.cpp makes arrays of any length of one kind of item, or of one length of a list of them.
void prepare_array(common_json & schema, const std::string & path, schema_report & report);

} // namespace s2moe
