// What was learnt about one way of speculating.

#pragma once

#include "calibration.h"
#include "cascade.h"
#include "controller.h"
#include "json.h"

namespace s2moe {

// Answers of one preset and one number of draft experts share it: others take other times, and their drafts are
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

// [] for a key that is missing. Throws common_json_error.
std::vector<double> read_numbers(const common_json & object, const char * key);

} // namespace s2moe
