// Tools for every template: those that know none get a description of the tools, and a format for calls.

#pragma once

#include "chat.h"

namespace s2moe {

// What a template does with tools.
struct tool_support {
    bool has_calls = false; // it has a format for calls
    bool describes = false; // it tells the model which tools there are
};

tool_support find_tool_support(const common_chat_templates * templates);

/*
 * common_chat_templates_apply() with tools that always work:
 *   a template that has no format for calls gets the most common one, <tool_call>{"name": …, "arguments":
 * …}</tool_call>; a template that does not describe tools gets a system message that does. With tool_choice "none" the
 * model is told of no tools.
 */
common_chat_params apply_with_tools(const common_chat_templates * templates,
                                    const tool_support & support,
                                    common_chat_templates_inputs inputs);

} // namespace s2moe
