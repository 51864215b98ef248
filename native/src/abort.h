// The switch that ends a decode, or the work on a grammar.

#pragma once

#include <atomic>

#include "s2moe.h"

struct s2moe_abort {
    std::atomic<bool> requested = false;
};

namespace s2moe {

// While it lives, the switch (nullptr: none) ends what this thread does with grammars, by llama_grammar_aborted.
class grammar_abort {
  public:
    explicit grammar_abort(s2moe_abort * abort);
    grammar_abort(const grammar_abort &) = delete;
    grammar_abort & operator=(const grammar_abort &) = delete;
    ~grammar_abort();
};

} // namespace s2moe
