#include "error.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace s2moe {
namespace {

thread_local std::string last_error;

} // namespace

int32_t fail(s2moe_status status, const std::string & message) noexcept {
    try {
        last_error = message;
        std::replace(last_error.begin(), last_error.end(), '\n', ' ');
    } catch (...) {
        last_error.clear();
    }
    return status;
}

int32_t guard(s2moe_status otherwise, const std::function<void()> & body) noexcept {
    try {
        body();
        return S2MOE_OK;
    } catch (const failure & e) {
        return fail(e.status, e.what());
    } catch (const std::bad_alloc &) {
        return fail(S2MOE_ERROR_NO_MEMORY, "out of memory");
    } catch (const std::exception & e) {
        return fail(otherwise, e.what());
    } catch (...) {
        return fail(otherwise, "unknown error");
    }
}

char * copy_string(const std::string & text) {
    char * copy = static_cast<char *>(std::malloc(text.size() + 1));
    if (copy == nullptr) {
        throw std::bad_alloc();
    }
    std::memcpy(copy, text.c_str(), text.size() + 1);
    return copy;
}

} // namespace s2moe

const char * s2moe_last_error(void) {
    return s2moe::last_error.c_str();
}

void s2moe_string_free(char * string) {
    std::free(string);
}
