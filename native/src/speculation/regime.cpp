#include "regime.h"

#include <algorithm>
#include <cmath>

namespace s2moe {

std::vector<double> read_numbers(const common_json & object, const char * key) {
    std::vector<double> result;
    if (object.contains(key)) {
        for (const common_json & each : object.at(key)) {
            result.push_back(each.get<double>());
        }
    }
    return result;
}

common_json regime::save() const {
    return {{"controller", pacing.save()},
            {"confidence", confidences.save()},
            {"means", std::vector<double>{draft_seconds, single_seconds, typical_hits, typical_misses}}};
}

void regime::load(const common_json & state) {
    pacing.load(read_numbers(state, "controller")); // each checks what it takes
    confidences.load(read_numbers(state, "confidence"));
    const std::vector<double> means = read_numbers(state, "means");
    const bool possible =
        means.size() == 4 && std::all_of(means.begin(), means.end(), [](double x) { return x >= -1 && x < 1e6; });
    if (possible) {
        draft_seconds = means[0];
        single_seconds = means[1];
        typical_hits = means[2];
        typical_misses = means[3];
    }
}

regime & regimes::of(const std::string & key) {
    const auto found = std::find_if(by_age.begin(), by_age.end(), [&](const auto & each) { return each.first == key; });
    if (found != by_age.end()) {
        by_age.splice(by_age.end(), by_age, found);
        return found->second;
    }
    if (by_age.size() == n_max) {
        by_age.pop_front();
    }
    return by_age.emplace_back(key, regime{}).second;
}

common_json regimes::save() const {
    common_json state = common_json::object();
    for (const auto & [key, each] : by_age) {
        state[key] = each.save();
    }
    return state;
}

void regimes::load(const common_json & state) {
    by_age.clear();
    for (const auto & [key, each] : state.items()) {
        of(key).load(each);
    }
}

} // namespace s2moe
