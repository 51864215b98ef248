// What was learnt about one way of speculating.

#pragma once

#include <cstddef>
#include <list>
#include <string>
#include <utility>
#include <vector>

#include "calibration.h"
#include "cascade.h"
#include "controller.h"
#include "json.h"

namespace s2moe {

// Answers with the same speculation_options::regime_key() share it: others take other times, and their drafts are
// believed differently. Decayed means; 0, or -1 for the typical numbers: unknown.
struct regime {
    controller pacing;
    calibration confidences;
    cascade lengths;            // not kept
    double draft_seconds = 0;   // of one evaluation by the draft
    double single_seconds = 0;  // T_AR: of one token by the target, without drafts
    double typical_hits = -1;   // experts in memory that one more row of a verification adds
    double typical_misses = -1; // experts on the drive

    common_json save() const;
    // What does not fit is left as it is, to be learnt again. Throws common_json_error.
    void load(const common_json & state);
};

// The regimes of a model. There are not many: where a new one finds no room, the one goes that was used least recently,
// so that requests that try everything out do not take away what ordinary ones learnt.
class regimes {
  public:
    static constexpr size_t n_max = 16;

    // Of a new key: one that knows nothing. The reference is good until n_max other keys were asked for.
    regime & of(const std::string & key);

    // An object of regimes by key, the least recently used one first.
    common_json save() const;
    // Takes the place of all there are; of too many, the most recently used. Throws common_json_error.
    void load(const common_json & state);

  private:
    std::list<std::pair<std::string, regime>> by_age; // the least recently used one first
};

// [] for a key that is missing. Throws common_json_error.
std::vector<double> read_numbers(const common_json & object, const char * key);

} // namespace s2moe
