#include <sstream>
#include <string>
#include <vector>

#include "json.h"
#include "s2moe.h"

namespace {

std::vector<std::string> split(const std::string & list) {
    std::vector<std::string> parts;
    std::istringstream stream(list);
    for (std::string part; std::getline(stream, part, ',');) {
        parts.push_back(part);
    }
    return parts;
}

} // namespace

int32_t s2moe_abi_version(void) {
    return S2MOE_ABI_VERSION;
}

const char * s2moe_build_info(void) {
    static const std::string info =
        common_json{
            {"version", S2MOE_VERSION},
            {"source", S2MOE_SOURCE},
            {"cuda", static_cast<bool>(S2MOE_CUDA_ENABLED)},
            {"cuda_toolkit", S2MOE_CUDA_TOOLKIT},
            {"cuda_architectures", split(S2MOE_CUDA_ARCHITECTURES)},
        }
            .dump_safe();
    return info.c_str();
}
