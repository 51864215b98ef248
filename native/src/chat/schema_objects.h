// Keywords of JSON schema about objects.

#pragma once

#include <string>

#include "json.h"
#include "schema_report.h"

namespace s2moe {

// llama.cpp makes objects of the properties that are listed, in their order, and of others behind them if
// additionalProperties lets them in or there is no list.
void prepare_object(common_json & schema, const std::string & path, schema_report & report);

} // namespace s2moe
