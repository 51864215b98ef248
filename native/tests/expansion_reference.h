// The rules of speculation/expansion.h once more, as plainly as possible: nodes are paths of tokens, sets are std::set,
// and everything is computed from scratch each time.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "speculation/expansion.h"

namespace s2moe {

using pairs = std::set<std::pair<int, int>>;
using continuations = std::vector<std::pair<int32_t, double>>;

constexpr int n_layers = 3;
constexpr int n_expert = 12;

inline expert_set as_set(const pairs & members) {
    expert_set set(n_layers, n_expert);
    for (const auto & [layer, expert] : members) {
        set.add(layer, expert);
    }
    return set;
}

inline pairs random_pairs(std::mt19937_64 & random, int n) {
    pairs result;
    for (int i = 0; i < n; ++i) {
        result.insert({static_cast<int>(random() % n_layers), static_cast<int>(random() % n_expert)});
    }
    return result;
}

// A model to draft from: what follows a path of tokens and which experts its last one uses.
struct random_model {
    uint64_t seed;
    int n_experts_used;

    std::mt19937_64 at(const std::vector<int32_t> & path) const {
        uint64_t hash = seed;
        for (const int32_t token : path) {
            hash = (hash ^ static_cast<uint64_t>(token)) * 0x9e3779b97f4a7c15u + 1;
        }
        return std::mt19937_64(hash);
    }

    pairs routing(const std::vector<int32_t> & path) const {
        auto random = at(path);
        return random_pairs(random, n_experts_used);
    }

    continuations next(const std::vector<int32_t> & path) const {
        auto random = at(path);
        continuations result;
        double left = 1;
        for (int i = 0; i < 5; ++i) {
            const double share = std::uniform_real_distribution<double>(0.2, 0.9)(random);
            result.emplace_back(static_cast<int32_t>(100 * (path.size() + 1) + i), left * share);
            left *= 1 - share;
        }
        return result;
    }
};

struct setting {
    expansion_costs costs;
    expansion_limits limits;
    pairs root, resident;
    double typical_hits = -1, typical_misses = -1;
};

struct reference {
    using path = std::vector<int32_t>;

    struct node {
        double calibrated = 0, product = 0;
        int rank = 0; // order of offers
        bool evaluated = false, admitted = false, by_finish = false;
    };

    const random_model & model;
    const setting & given;
    std::map<path, node> nodes;
    std::vector<path> evaluations, admissions;
    std::vector<std::pair<int, int>> fresh; // new hits and misses of evaluated() admissions

    pairs covered() const {
        pairs all = given.root;
        for (const auto & [key, value] : nodes) {
            if (value.admitted && value.evaluated) {
                const pairs own = model.routing(key);
                all.insert(own.begin(), own.end());
            }
        }
        return all;
    }

    void offer(const path & parent) {
        const auto tokens = model.next(parent);
        const int n = given.limits.width ? given.limits.children_max : std::min(given.limits.children_max, 1);
        for (int i = 0; i < std::min<int>(n, tokens.size()); ++i) {
            if (static_cast<int>(parent.size()) < given.limits.depth_max) {
                path key = parent;
                key.push_back(tokens[i].first);
                const double before = parent.empty() ? 1 : nodes.at(parent).product;
                nodes[key] = {tokens[i].second, before * tokens[i].second, static_cast<int>(nodes.size())};
            }
        }
    }

    int n_admitted() const {
        return static_cast<int>(admissions.size());
    }

    bool allowed(const path & key) const {
        const path parent(key.begin(), key.end() - 1);
        if ((!parent.empty() && !nodes.at(parent).admitted) || n_admitted() >= given.limits.nodes_max) {
            return false;
        }
        std::set<path> all(admissions.begin(), admissions.end());
        all.insert(key);
        int leaves = 0;
        for (const path & each : all) {
            leaves += std::none_of(all.begin(), all.end(), [&](const path & other) {
                return other.size() == each.size() + 1 && std::equal(each.begin(), each.end(), other.begin());
            });
        }
        return leaves <= given.limits.leaves_max;
    }

    std::pair<int, int> new_experts(const path & key) const {
        const pairs all = covered();
        std::pair<int, int> result;
        for (const auto & pair : model.routing(key)) {
            if (!all.contains(pair)) {
                ++(given.resident.contains(pair) ? result.first : result.second);
            }
        }
        return result;
    }

    double typical() const {
        if (fresh.empty()) {
            return given.typical_hits < 0
                       ? -1
                       : given.costs.hit_seconds * given.typical_hits + given.costs.miss_seconds * given.typical_misses;
        }
        int hits = 0;
        int misses = 0;
        for (const auto & [h, m] : fresh) {
            hits += h;
            misses += m;
        }
        const double n = static_cast<double>(fresh.size());
        return (given.costs.hit_seconds * hits + given.costs.miss_seconds * misses) / n;
    }

    double worth(const node & value) const {
        return value.product * given.costs.single_seconds;
    }

    // The key for which f gives the most; f gives nothing for NaN.
    template <typename F> path best(F && f) const {
        path found;
        double most = 0;
        int rank = 0;
        for (const auto & [key, value] : nodes) {
            const double score = f(key, value);
            if (!std::isnan(score) && (found.empty() || score > most || (score == most && value.rank < rank))) {
                found = key;
                most = score;
                rank = value.rank;
            }
        }
        return found;
    }

    path next() const {
        const double nothing = std::numeric_limits<double>::quiet_NaN();
        return best([&](const path & key, const node & value) {
            const bool hopeless =
                worth(value) <= 0 || worth(value) < given.costs.row_seconds + given.costs.draft_seconds;
            const bool barren =
                static_cast<int>(key.size()) == given.limits.depth_max || n_admitted() + 1 == given.limits.nodes_max;
            const double price = given.costs.row_seconds + typical();
            const double child = value.product * value.calibrated * given.costs.single_seconds;
            const bool later =
                typical() >= 0 && (barren || worth(value) < price || child < price + given.costs.draft_seconds);
            return value.evaluated || value.admitted || !allowed(key) || hopeless || later ? nothing : value.product;
        });
    }

    void admit_all() {
        while (true) {
            const double nothing = std::numeric_limits<double>::quiet_NaN();
            const path found = best([&](const path & key, const node & value) {
                if (!value.evaluated || value.admitted || !allowed(key)) {
                    return nothing;
                }
                const auto [hits, misses] = new_experts(key);
                const double cost =
                    given.costs.row_seconds + given.costs.hit_seconds * hits + given.costs.miss_seconds * misses;
                return worth(value) > 0 && worth(value) >= cost ? worth(value) - cost : nothing;
            });
            if (found.empty()) {
                return;
            }
            fresh.push_back(new_experts(found));
            nodes[found].admitted = true;
            admissions.push_back(found);
            offer(found);
        }
    }

    void run() {
        offer({});
        for (path key = next(); !key.empty(); key = next()) {
            evaluations.push_back(key);
            nodes[key].evaluated = true;
            admit_all();
        }
        const double routing = typical();
        while (routing >= 0) {
            const double nothing = std::numeric_limits<double>::quiet_NaN();
            const path found = best([&](const path & key, const node & value) {
                const bool passes = !value.evaluated && !value.admitted && allowed(key) && worth(value) > 0 &&
                                    worth(value) >= given.costs.row_seconds + routing;
                return passes ? value.product : nothing;
            });
            if (found.empty()) {
                return;
            }
            nodes[found].admitted = nodes[found].by_finish = true;
            admissions.push_back(found);
        }
    }
};

} // namespace s2moe
