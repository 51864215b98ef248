// Compute graphs by shape, so that drafts and verifications of changing width do not rebuild each other's.

#pragma once

#include <map>
#include <memory>

#include "llama-moe.h"

namespace s2moe {

// The graphs of one context. A context keeps only the last graph; here every kind of small decode has its own.
class graph_sets {
  public:
    explicit graph_sets(llama_context * ctx) : ctx(ctx) {
    }

    // While it lives, the context uses the graphs of one shape.
    class use {
      public:
        use(llama_context * ctx, llama_moe_graphs * graphs) : ctx(ctx), graphs(graphs) {
            llama_moe_swap_graphs(ctx, graphs);
        }
        ~use() {
            llama_moe_swap_graphs(ctx, graphs);
        }
        use(const use &) = delete;
        use & operator=(const use &) = delete;

      private:
        llama_context * ctx;
        llama_moe_graphs * graphs;
    };

    // shape: any number that stands for what the graph depends on
    use of(int shape) {
        auto & graphs = sets[shape];
        if (graphs == nullptr) {
            graphs.reset(llama_moe_graphs_create(ctx));
        }
        return {ctx, graphs.get()};
    }

    size_t n_bytes() const {
        size_t sum = 0;
        for (const auto & [shape, graphs] : sets) {
            sum += llama_moe_graphs_bytes(graphs.get());
        }
        return sum;
    }

  private:
    struct deleter {
        void operator()(llama_moe_graphs * graphs) const {
            llama_moe_graphs_free(graphs);
        }
    };

    llama_context * ctx;
    std::map<int, std::unique_ptr<llama_moe_graphs, deleter>> sets;
};

} // namespace s2moe
