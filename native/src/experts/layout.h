// Where the experts of a model lie in its GGUF files. Read from the headers only.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ggml.h"

namespace s2moe {

// One matrix of every expert of a layer: a stacked tensor, expert e at offset + e * bytes.
struct expert_part {
    std::string tensor;
    ggml_type type = GGML_TYPE_F32;
    int64_t ne[2] = {};  // of one expert: values per row, rows
    uint64_t bytes = 0;  // of one expert
    int file = 0;        // index in expert_layout::files
    uint64_t offset = 0; // of expert 0 in that file
};

// Parts are in the order in which a graph uses them: up, gate (or gate_up), down.
struct expert_layer {
    int layer = 0; // of the model
    int n_expert = 0;
    int slot_class = 0; // index in expert_layout::classes
    std::vector<expert_part> parts;

    uint64_t expert_bytes() const;
};

// Layers whose experts fit the same slots.
struct slot_class {
    std::vector<uint64_t> part_bytes; // memory of each part of a slot, see slot_part_bytes()
    uint64_t slot_bytes = 0;          // their sum
    int n_layers = 0;
    int n_experts = 0;           // of all those layers
    int n_experts_per_layer = 0; // of the largest
};

struct model_file {
    std::string path;
    uint64_t bytes = 0;
};

struct expert_layout {
    std::string architecture;
    std::string name;
    int64_t n_layer = 0;
    int64_t n_ctx_train = 0;
    int64_t n_vocab = 0;
    int64_t n_expert = 0;
    int64_t n_expert_used = 0;
    std::vector<model_file> files;
    uint64_t dense_bytes = 0;
    uint64_t expert_bytes = 0;
    std::map<std::string, uint64_t> type_bytes;
    std::vector<expert_layer> layers; // those with experts, in ascending order
    std::vector<slot_class> classes;

    // Reads the headers of a model. Throws failure: S2MOE_ERROR_IO for a file that is missing, unreadable, no GGUF or
    // shorter than its tensors.
    static expert_layout read(const std::string & path);

    std::string to_json() const;
};

// Reads for O_DIRECT begin and end at multiples of this; it suits every common drive.
constexpr uint64_t io_alignment = 4096;

// Memory for a matrix of n bytes that is read with its unaligned start and end: whole blocks around it.
constexpr uint64_t slot_part_bytes(uint64_t n) {
    return (n + 2 * io_alignment - 2) / io_alignment * io_alignment;
}

} // namespace s2moe
