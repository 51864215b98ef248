// Keeps the grammar of an answer's content off its reasoning.

#pragma once

#include <optional>
#include <string>
#include <vector>

#include "common.h"
#include "json.h"

namespace s2moe {

/*
 * Follows the text of an answer: while is_open(), tokens are chosen without the grammar.
 *
 * An answer whose prompt does not already begin the reasoning may do so with its first token, or not at all: that is
 * the model's choice.
 */
class thinking_gate {
  public:
    // The gate for a client's own grammar; nothing where the grammar is a chat's, which knows reasoning itself.
    static std::optional<thinking_gate> read(const common_json & params, const common_params_sampling & sampling);

    bool is_open() const {
        return state != over;
    }

    // Tells what the model would say without the grammar. false: that does not belong to reasoning, and the gate is
    // closed from here on.
    bool admits(const std::string & piece, bool is_end);

    // Tells what was said, after admits().
    void follow(const std::string & piece);

  private:
    enum { undecided, thinking, over } state = undecided;
    std::string start;
    std::vector<std::string> content_starts;
    std::string tail;
};

} // namespace s2moe
