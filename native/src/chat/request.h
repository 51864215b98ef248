// What s2moe_chat_apply() is asked for, read and bounded before llama.cpp recurses over it.

#pragma once

#include <string>
#include <vector>

#include "chat.h"
#include "json.h"

namespace s2moe {

// How deep brackets of JSON text nest, without parsing it.
int json_depth(const std::string & text);

struct chat_request {
    common_chat_templates_inputs inputs;
    std::vector<std::string> unenforced; // of schemas: see prepare_schema()
};

// Throws failure: S2MOE_ERROR_INVALID (the message begins with the place) or S2MOE_ERROR_GRAMMAR.
chat_request read_chat_request(const std::string & request_json);

} // namespace s2moe
