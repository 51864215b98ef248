// Errors inside libs2moe: thrown as `failure`, turned into a status and a message at the C border.

#pragma once

#include <functional>
#include <stdexcept>
#include <string>

#include "s2moe.h"

namespace s2moe {

struct failure : std::runtime_error {
    failure(s2moe_status status, const std::string & message) : std::runtime_error(message), status(status) {
    }
    s2moe_status status;
};

// Records why a call of this thread failed; returns the status, so that callers can `return fail(...)`.
int32_t fail(s2moe_status status, const std::string & message) noexcept;

// Runs the body of a C function. An exception becomes its status (`failure`), S2MOE_ERROR_NO_MEMORY
// (std::bad_alloc) or `otherwise`, with its text as the message.
int32_t guard(s2moe_status otherwise, const std::function<void()> & body) noexcept;

// A malloc'ed copy for a `char **` result; throws std::bad_alloc.
char * copy_string(const std::string & text);

} // namespace s2moe
