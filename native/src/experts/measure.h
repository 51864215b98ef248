// How fast the drive delivers experts in random order.

#pragma once

#include <cstdint>

#include "layout.h"
#include "reader.h"

namespace s2moe {

// Reads about n_bytes of random matrices with a reader of its own; returns bytes per second. reader_kind and
// queue_depth as in expert_reader::create(). Throws failure (S2MOE_ERROR_IO), std::bad_alloc.
double measure_drive(
    const expert_layout & layout, model_files & files, const char * reader_kind, int queue_depth, uint64_t n_bytes);

} // namespace s2moe
