// The conventions of s2moe.h: statuses, messages per thread, freeing nothing.

#include <cstring>
#include <thread>

#include "check.h"

int main() {
    CHECK(s2moe_abi_version() == S2MOE_ABI_VERSION);
    CHECK(std::strstr(s2moe_build_info(), "\"source\":\"0.3.36-") != nullptr);
    CHECK(std::strcmp(s2moe_last_error(), "") == 0);

    CHECK(s2moe_answer_create("not json") == nullptr);
    CHECK(std::strlen(s2moe_last_error()) > 0);
    CHECK(std::strchr(s2moe_last_error(), '\n') == nullptr);
    std::thread([] { CHECK(std::strcmp(s2moe_last_error(), "") == 0); }).join();

    s2moe_string_free(nullptr);
    s2moe_sampler_free(nullptr);
    s2moe_chat_free(nullptr);
    s2moe_answer_free(nullptr);
    s2moe_abort_free(nullptr);
    return 0;
}
