#include "json.h"
#include "llama.h"
#include "s2moe.h"

int32_t s2moe_abi_version(void) {
    return S2MOE_ABI_VERSION;
}

const char * s2moe_build_info(void) {
    static const std::string info =
        common_json{
            {"version", S2MOE_VERSION},
            {"source", S2MOE_SOURCE},
            {"cuda", static_cast<bool>(S2MOE_CUDA_ENABLED)},
            {"system", llama_print_system_info()},
        }
            .dump_safe();
    return info.c_str();
}
