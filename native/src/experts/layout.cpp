#include "layout.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <regex>
#include <set>

#include "error.h"
#include "gguf.h"
#include "json.h"
#include "llama.h"

namespace s2moe {

namespace {

constexpr int n_split_max = 1000;
constexpr int64_t n_layer_max = 512;   // LLAMA_MAX_LAYERS
constexpr int64_t n_expert_max = 1024; // LLAMA_MAX_EXPERTS

struct header_deleter {
    void operator()(gguf_context * gguf) const {
        gguf_free(gguf);
    }
    void operator()(ggml_context * tensors) const {
        ggml_free(tensors);
    }
};

struct header {
    std::unique_ptr<gguf_context, header_deleter> gguf;
    std::unique_ptr<ggml_context, header_deleter> tensors;
};

[[noreturn]] void refuse(const std::string & path, const std::string & why) {
    throw failure(S2MOE_ERROR_IO, path + ": " + why);
}

uint64_t file_size(const std::string & path) {
    struct stat info = {};
    if (stat(path.c_str(), &info) != 0) {
        refuse(path, std::strerror(errno));
    }
    if (!S_ISREG(info.st_mode)) {
        refuse(path, "is not a regular file");
    }
    return static_cast<uint64_t>(info.st_size);
}

header read_header(const std::string & path) {
    file_size(path); // names what is wrong with a path that cannot be opened
    header result;
    ggml_context * tensors = nullptr;
    result.gguf.reset(gguf_init_from_file(path.c_str(), {.no_alloc = true, .ctx = &tensors}));
    result.tensors.reset(tensors);
    if (result.gguf == nullptr || tensors == nullptr) {
        refuse(path, "is no GGUF file or its header is damaged; fetch the file again");
    }
    return result;
}

std::optional<int64_t> integer(const gguf_context * gguf, const std::string & key) {
    const int64_t id = gguf_find_key(gguf, key.c_str());
    if (id < 0) {
        return std::nullopt;
    }
    switch (gguf_get_kv_type(gguf, id)) {
    case GGUF_TYPE_UINT8:
        return gguf_get_val_u8(gguf, id);
    case GGUF_TYPE_INT8:
        return gguf_get_val_i8(gguf, id);
    case GGUF_TYPE_UINT16:
        return gguf_get_val_u16(gguf, id);
    case GGUF_TYPE_INT16:
        return gguf_get_val_i16(gguf, id);
    case GGUF_TYPE_UINT32:
        return gguf_get_val_u32(gguf, id);
    case GGUF_TYPE_INT32:
        return gguf_get_val_i32(gguf, id);
    case GGUF_TYPE_UINT64:
        return static_cast<int64_t>(gguf_get_val_u64(gguf, id));
    case GGUF_TYPE_INT64:
        return gguf_get_val_i64(gguf, id);
    default:
        return std::nullopt;
    }
}

// Anything but printable ASCII becomes "?": it goes into JSON and logs.
std::string printable(std::string text) {
    for (char & each : text) {
        each = each >= ' ' && each <= '~' ? each : '?';
    }
    return text;
}

std::string text(const gguf_context * gguf, const char * key) {
    const int64_t id = gguf_find_key(gguf, key);
    return id >= 0 && gguf_get_kv_type(gguf, id) == GGUF_TYPE_STRING ? printable(gguf_get_val_str(gguf, id)) : "";
}

// The largest of a value that may be one number or one per layer.
int64_t largest(const gguf_context * gguf, const std::string & key) {
    if (const auto value = integer(gguf, key)) {
        return *value;
    }
    const int64_t id = gguf_find_key(gguf, key.c_str());
    if (id < 0 || gguf_get_kv_type(gguf, id) != GGUF_TYPE_ARRAY) {
        return 0;
    }
    const auto type = gguf_get_arr_type(gguf, id);
    if (type != GGUF_TYPE_UINT32 && type != GGUF_TYPE_INT32) {
        return 0;
    }
    const auto * values = static_cast<const int32_t *>(gguf_get_arr_data(gguf, id));
    const size_t n = gguf_get_arr_n(gguf, id);
    return n == 0 ? 0 : *std::max_element(values, values + n);
}

// Paths of all files of a model, `path` first.
std::vector<std::string> split_paths(const std::string & path, const gguf_context * gguf) {
    const int64_t n_split = integer(gguf, "split.count").value_or(1);
    if (n_split <= 1) {
        return {path};
    }
    const int64_t number = integer(gguf, "split.no").value_or(0);
    if (n_split > n_split_max) {
        refuse(path, "says that it is one of " + std::to_string(n_split) + " files");
    }
    if (number != 0) {
        refuse(path, "is file " + std::to_string(number + 1) + " of a split model; name the first one");
    }
    std::vector<char> prefix(path.size() + 1);
    if (llama_split_prefix(prefix.data(), prefix.size(), path.c_str(), 0, static_cast<int32_t>(n_split)) == 0) {
        refuse(path,
               "is the first of " + std::to_string(n_split) +
                   " files, but its name does not end in -00001-of-0000N.gguf; rename the files back");
    }
    std::vector<std::string> paths = {path};
    for (int32_t i = 1; i < n_split; ++i) {
        std::vector<char> buffer(path.size() + 64);
        llama_split_path(buffer.data(), buffer.size(), prefix.data(), i, static_cast<int32_t>(n_split));
        paths.emplace_back(buffer.data());
    }
    return paths;
}

// The place of the matrix in an expert.
int part_order(const std::string & kind) {
    static const std::vector<std::string> kinds = {"up", "gate", "gate_up", "down"};
    return static_cast<int>(std::find(kinds.begin(), kinds.end(), kind) - kinds.begin());
}

class layout_builder {
  public:
    explicit layout_builder(const std::string & path) : path(path) {
        const header first = read_header(path);
        read_metadata(first.gguf.get());
        const auto paths = split_paths(path, first.gguf.get());
        add_file(paths[0], first);
        for (size_t i = 1; i < paths.size(); ++i) {
            const header next = read_header(paths[i]);
            const auto number = integer(next.gguf.get(), "split.no").value_or(-1);
            const auto count = integer(next.gguf.get(), "split.count").value_or(-1);
            if (number != static_cast<int64_t>(i) || count != static_cast<int64_t>(paths.size())) {
                refuse(paths[i], "does not belong to " + path + "; fetch the missing file");
            }
            add_file(paths[i], next);
        }
        // what another model's part would betray
        if (const auto n = integer(first.gguf.get(), "split.tensors.count");
            n && paths.size() > 1 && *n != static_cast<int64_t>(names.size())) {
            refuse(path,
                   "announces " + std::to_string(*n) + " tensors, but its files hold " + std::to_string(names.size()) +
                       "; a file belongs to another model");
        }
        finish();
    }

    expert_layout layout;

  private:
    void read_metadata(const gguf_context * gguf) {
        layout.architecture = text(gguf, "general.architecture");
        layout.name = text(gguf, "general.name");
        const std::string prefix = layout.architecture + ".";
        layout.n_layer = integer(gguf, prefix + "block_count").value_or(0);
        layout.n_ctx_train = integer(gguf, prefix + "context_length").value_or(0);
        layout.n_expert = integer(gguf, prefix + "expert_count").value_or(0);
        layout.n_expert_used = largest(gguf, prefix + "expert_used_count");
        check_metadata();
        const int64_t tokens = gguf_find_key(gguf, "tokenizer.ggml.tokens");
        if (tokens >= 0 && gguf_get_kv_type(gguf, tokens) == GGUF_TYPE_ARRAY) {
            layout.n_vocab = static_cast<int64_t>(gguf_get_arr_n(gguf, tokens));
        }
    }

    // What llama.cpp would abort the process for.
    void check_metadata() const {
        const auto refuse_value = [&](const char * key, int64_t value, const std::string & allowed) {
            refuse(path,
                   "says " + layout.architecture + "." + key + " = " + std::to_string(value) + ", allowed are " +
                       allowed + "; its header is damaged");
        };
        if (layout.n_layer < 0 || layout.n_layer > n_layer_max) {
            refuse_value("block_count", layout.n_layer, "up to " + std::to_string(n_layer_max));
        }
        if (layout.n_expert < 0 || layout.n_expert > n_expert_max) {
            refuse_value("expert_count", layout.n_expert, "up to " + std::to_string(n_expert_max));
        }
        if (layout.n_expert > 0 && (layout.n_expert_used < 1 || layout.n_expert_used > layout.n_expert)) {
            refuse_value("expert_used_count", layout.n_expert_used, "1 to " + std::to_string(layout.n_expert));
        }
    }

    void add_file(const std::string & path, const header & header) {
        const int file = static_cast<int>(layout.files.size());
        const uint64_t n_bytes = file_size(path);
        layout.files.push_back({path, n_bytes});
        const uint64_t data = gguf_get_data_offset(header.gguf.get());
        for (int64_t i = 0; i < gguf_get_n_tensors(header.gguf.get()); ++i) {
            const char * name = gguf_get_tensor_name(header.gguf.get(), i);
            const ggml_tensor * tensor = ggml_get_tensor(header.tensors.get(), name);
            const uint64_t offset = gguf_get_tensor_offset(header.gguf.get(), i);
            if (tensor == nullptr || !names.insert(name).second) {
                refuse(path, "has the tensor " + printable(name) + " twice");
            }
            const uint64_t size = ggml_nbytes(tensor);
            if (offset > n_bytes || data > n_bytes - offset || size > n_bytes - offset - data) {
                refuse(path,
                       "is too short for the tensor " + printable(name) +
                           ", which its table puts past the end; fetch the file again");
            }
            add_tensor(name, tensor, file, data + offset, size);
        }
    }

    void add_tensor(const std::string & name, const ggml_tensor * tensor, int file, uint64_t offset, uint64_t size) {
        static const std::regex pattern(R"(blk\.(\d{1,5})\.ffn_(up|gate|gate_up|down)_exps\.weight)");
        layout.type_bytes[ggml_type_name(tensor->type)] += size;
        std::smatch match;
        if (!std::regex_match(name, match, pattern) || layout.n_expert <= 0) {
            layout.dense_bytes += size;
            return;
        }
        const int64_t n_expert = tensor->ne[2];
        if (n_expert != layout.n_expert || tensor->ne[3] != 1) {
            refuse(layout.files[file].path,
                   "has " + std::to_string(n_expert) + " experts in " + name + ", but says that there are " +
                       std::to_string(layout.n_expert) + " in a layer");
        }
        if (size == 0 || n_expert > n_expert_max) {
            refuse(layout.files[file].path,
                   "has " + std::to_string(size) + " bytes for " + std::to_string(n_expert) + " experts in " + name +
                       "; its header is damaged");
        }
        layout.expert_bytes += size;
        auto & parts = layers[std::stoi(match[1])];
        expert_part & part = parts[part_order(match[2])];
        part.tensor = name;
        part.type = tensor->type;
        part.ne[0] = tensor->ne[0];
        part.ne[1] = tensor->ne[1];
        part.bytes = size / n_expert;
        part.file = file;
        part.offset = offset;
    }

    void finish() {
        for (const auto & [number, parts] : layers) {
            expert_layer layer;
            layer.layer = number;
            layer.n_expert = static_cast<int>(layout.n_expert);
            for (const auto & [order, part] : parts) {
                layer.parts.push_back(part);
            }
            layer.slot_class = class_of(layer);
            layout.layers.push_back(std::move(layer));
        }
    }

    int class_of(const expert_layer & layer) {
        std::vector<uint64_t> part_bytes;
        uint64_t slot_bytes = 0;
        for (const expert_part & part : layer.parts) {
            part_bytes.push_back(slot_part_bytes(part.bytes));
            slot_bytes += part_bytes.back();
        }
        auto found = std::find_if(layout.classes.begin(), layout.classes.end(), [&](const slot_class & each) {
            return each.part_bytes == part_bytes;
        });
        if (found == layout.classes.end()) {
            found = layout.classes.insert(found, {part_bytes, slot_bytes, 0, 0, 0});
        }
        found->n_layers += 1;
        found->n_experts += layer.n_expert;
        found->n_experts_per_layer = std::max(found->n_experts_per_layer, layer.n_expert);
        return static_cast<int>(found - layout.classes.begin());
    }

    const std::string path;
    std::map<int, std::map<int, expert_part>> layers;
    std::set<std::string> names;
};

} // namespace

uint64_t expert_layer::expert_bytes() const {
    uint64_t sum = 0;
    for (const expert_part & part : parts) {
        sum += part.bytes;
    }
    return sum;
}

expert_layout expert_layout::read(const std::string & path) {
    return layout_builder(path).layout;
}

std::string expert_layout::to_json() const {
    common_json result = {{"architecture", architecture},
                          {"name", name},
                          {"n_layer", n_layer},
                          {"n_ctx_train", n_ctx_train},
                          {"n_vocab", n_vocab},
                          {"n_expert", n_expert},
                          {"n_expert_used", n_expert_used}};
    uint64_t file_bytes = 0;
    common_json file_list = common_json::array();
    for (const model_file & file : files) {
        file_bytes += file.bytes;
        file_list.push_back({{"path", file.path}, {"size_bytes", file.bytes}});
    }
    result["files"] = file_list;
    result["file_bytes"] = file_bytes;
    result["dense_bytes"] = dense_bytes;
    result["expert_bytes"] = expert_bytes;
    common_json types = common_json::object();
    for (const auto & [type, n_bytes] : type_bytes) {
        types[type] = n_bytes;
    }
    result["tensor_types"] = types;
    common_json class_list = common_json::array();
    for (const slot_class & each : classes) {
        class_list.push_back(
            {{"slot_bytes", each.slot_bytes}, {"n_layers", each.n_layers}, {"n_experts", each.n_experts}});
    }
    result["classes"] = class_list;
    common_json layer_list = common_json::array();
    for (const expert_layer & layer : layers) {
        common_json parts = common_json::array();
        for (const expert_part & part : layer.parts) {
            parts.push_back({{"tensor", part.tensor},
                             {"type", ggml_type_name(part.type)},
                             {"bytes", part.bytes},
                             {"file", part.file},
                             {"offset", part.offset}});
        }
        layer_list.push_back({{"layer", layer.layer},
                              {"class", layer.slot_class},
                              {"n_expert", layer.n_expert},
                              {"expert_bytes", layer.expert_bytes()},
                              {"parts", parts}});
    }
    result["layers"] = layer_list;
    return result.dump();
}

} // namespace s2moe
