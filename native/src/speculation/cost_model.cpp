#include "speculation/cost_model.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace s2moe {

namespace {

constexpr double state_version = 1;
constexpr double prior_weight = 5e-4; // observations
constexpr double least_weight = 0.25; // observations, of a kind that was ever observed
constexpr double first_usual_residual = 0.25;
constexpr double clip = 4;
constexpr double change_streak = 3;    // clipped residuals on end
constexpr double residual_memory = 30; // observations

using vector = std::array<double, 4>;
using matrix = std::array<vector, 4>;

double dot(const vector & a, const vector & b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        sum += a[i] * b[i];
    }
    return sum;
}

// Solves m x = y in the unknowns that `used` names as bits, the others being 0, by Cholesky's method.
bool solve(const matrix & m, const vector & y, unsigned used, vector & x) {
    std::array<size_t, 4> names{};
    size_t n = 0;
    for (size_t i = 0; i < 4; ++i) {
        if ((used >> i & 1) != 0) {
            names[n++] = i;
        }
    }
    matrix lower{};
    vector half{};
    for (size_t i = 0; i < n; ++i) {
        double rest = y[names[i]];
        for (size_t j = 0; j <= i; ++j) {
            double sum = m[names[i]][names[j]];
            for (size_t k = 0; k < j; ++k) {
                sum -= lower[i][k] * lower[j][k];
            }
            if (i != j) {
                lower[i][j] = sum / lower[j][j];
                rest -= lower[i][j] * half[j];
            } else if (sum > 0) {
                lower[i][i] = std::sqrt(sum);
            } else {
                return false;
            }
        }
        half[i] = rest / lower[i][i];
    }
    x = {};
    for (size_t i = n; i-- > 0;) {
        double sum = half[i];
        for (size_t k = i + 1; k < n; ++k) {
            sum -= lower[k][i] * x[names[k]];
        }
        x[names[i]] = sum / lower[i][i];
    }
    return true;
}

vector as_vector(const work_counts & work) {
    return {1, static_cast<double>(work.rows), static_cast<double>(work.hits), static_cast<double>(work.misses)};
}

} // namespace

cost_model::cost_model(double keep) : keep(std::clamp(keep, 0.5, 1.0)) {
}

cost_model::vector cost_model::coefficients() const {
    vector result{};
    for (size_t i = 0; i < n_features; ++i) {
        result[i] = unit[i] * scaled[i];
    }
    return result;
}

double cost_model::predict(const work_counts & work) const {
    return dot(coefficients(), as_vector(work));
}

double cost_model::marginal(const work_counts & extra) const {
    vector x = as_vector(extra);
    x[0] = 0;
    return std::max(0.0, dot(coefficients(), x));
}

// With all experts resident the fixed part is taken to cost 0.4 of what the experts of one row cost, a row 0.15; a
// missing expert is as dear as 16.
void cost_model::begin(const vector & work, double seconds) {
    const double experts = std::max(1.0, (work[2] + work[3]) / std::pow(work[1], 0.6));
    unit = {0.4 * experts, 0.15 * experts, 1, 16};
    const double scale = seconds / dot(unit, work);
    for (double & each : unit) {
        each *= scale;
    }
    scaled = {1, 1, 1, 1};
    reference_seconds = seconds;
    usual_residual = first_usual_residual;
}

void cost_model::observe(const work_counts & work, double seconds) {
    if (work.rows < 1 || work.hits < 0 || work.misses < 0 || !std::isfinite(seconds) || seconds <= 0) {
        return;
    }
    vector x = as_vector(work);
    if (n_seen == 0) {
        begin(x, seconds);
    } else {
        const std::pair<double, double> sample{predict(work), seconds};
        if (ring.size() < n_samples_max) {
            ring.push_back(sample);
        } else {
            ring[ring_next] = sample;
        }
        ring_next = (ring_next + 1) % n_samples_max;
    }
    const double expected = std::max(predict(work), 1e-3 * reference_seconds);
    const double weight = std::sqrt(expected * reference_seconds);
    for (size_t i = 0; i < n_features; ++i) {
        x[i] *= unit[i] / weight;
    }
    learn(kind_of(work), x, seconds / weight);
    n_seen += 1;
    (work.rows == 1 ? n_single : n_several) += 1;
}

// Rows 1, 2, 3 to 4, more; misses none, up to a tenth of the experts, more.
size_t cost_model::kind_of(const work_counts & work) {
    const size_t width = work.rows == 1 ? 0 : work.rows == 2 ? 1 : work.rows <= 4 ? 2 : 3;
    const size_t missing = work.misses == 0 ? 0 : work.misses <= (work.hits + work.misses) / 10 ? 1 : 2;
    return width * 3 + missing;
}

void cost_model::fade(double keep) {
    for (sums & each : kinds) {
        const double factor = std::max(keep, std::min(1.0, least_weight / std::max(each.weight, least_weight)));
        each.weight *= factor;
        for (size_t i = 0; i < n_features; ++i) {
            each.products[i] *= factor;
            for (double & square : each.squares[i]) {
                square *= factor;
            }
        }
    }
}

void cost_model::learn(size_t kind, const vector & x, double measured) {
    const double residual = std::abs(measured - dot(scaled, x));
    streak = residual > clip * usual_residual ? streak + 1 : 0;
    const bool changed = keep < 1 && streak >= change_streak;
    const double clipped = changed ? residual : std::min(residual, clip * usual_residual);
    const double trust = residual > 0 ? clipped / residual : 1;
    // of a normal distribution the mean absolute value is 0.8 standard deviations
    usual_residual += (1.25 * clipped - usual_residual) / std::min(n_seen + 4, residual_memory);
    usual_residual = std::max(usual_residual, 1e-6);

    fade(changed ? 0 : keep);
    sums & own = kinds[kind];
    own.weight += trust;
    for (size_t i = 0; i < n_features; ++i) {
        own.products[i] += trust * x[i] * measured;
        for (size_t j = 0; j < n_features; ++j) {
            own.squares[i][j] += trust * x[i] * x[j];
        }
    }
    solve_again();
}

// The coefficients >= 0 with the least squared error v'Rv - 2 v'y: of the sixteen choices of coefficients that are 0,
// the best whose others come out >= 0. false: the sums are not those of any observations.
bool cost_model::solve_again() {
    matrix squares{};
    vector products{};
    for (size_t i = 0; i < n_features; ++i) {
        squares[i][i] = products[i] = prior_weight;
        for (const sums & each : kinds) {
            products[i] += each.products[i];
            for (size_t j = 0; j < n_features; ++j) {
                squares[i][j] += each.squares[i][j];
            }
        }
    }
    double least = std::numeric_limits<double>::infinity();
    for (unsigned used = 0xf + 1; used-- > 0;) {
        vector candidate{};
        if (!solve(squares, products, used, candidate)) {
            return false;
        }
        // at the minimum for these coefficients v'Rv = v'y
        const double error = -dot(candidate, products);
        const bool allowed = *std::min_element(candidate.begin(), candidate.end()) >= 0;
        if (allowed && error < least) {
            least = error;
            scaled = candidate;
        }
        if (allowed && used == 0xf) {
            break; // nothing is better than the minimum without bounds
        }
    }
    return true;
}

bool cost_model::ready() const {
    return n_seen >= 16 && n_single >= 4 && n_several >= 4;
}

double cost_model::n_observed() const {
    return n_seen;
}

std::vector<std::pair<double, double>> cost_model::samples() const {
    std::vector<std::pair<double, double>> result(ring);
    if (ring.size() == n_samples_max) {
        std::rotate(result.begin(), result.begin() + static_cast<std::ptrdiff_t>(ring_next), result.end());
    }
    return result;
}

cost_model::fit cost_model::quality() const {
    fit result;
    const vector theta = coefficients();
    result.intercept = theta[0];
    result.row = theta[1];
    result.hit = theta[2];
    result.miss = theta[3];
    result.n = static_cast<int>(ring.size());
    if (ring.empty()) {
        return result;
    }
    double mean = 0;
    for (const auto & [predicted, measured] : ring) {
        mean += measured / result.n;
        result.mape += std::abs(predicted - measured) / measured / result.n;
    }
    double errors = 0;
    double deviations = 0;
    for (const auto & [predicted, measured] : ring) {
        errors += (predicted - measured) * (predicted - measured);
        deviations += (measured - mean) * (measured - mean);
    }
    result.r2 = deviations > 0 ? 1 - errors / deviations : 0;
    return result;
}

std::vector<double> cost_model::save() const {
    std::vector<double> state{state_version, n_seen, n_single, n_several, reference_seconds, usual_residual};
    state.insert(state.end(), unit.begin(), unit.end());
    for (const sums & each : kinds) {
        state.push_back(each.weight);
        state.insert(state.end(), each.products.begin(), each.products.end());
        for (const vector & row : each.squares) {
            state.insert(state.end(), row.begin(), row.end());
        }
    }
    return state;
}

bool cost_model::load(std::span<const double> state) {
    constexpr size_t n_numbers = 6 + n_features + n_kinds * (1 + n_features + n_features * n_features);
    if (state.size() != n_numbers || state[0] != state_version ||
        !std::all_of(state.begin(), state.end(), [](double value) { return std::isfinite(value) && value >= 0; })) {
        return false;
    }
    const double * next = state.data() + 1;
    cost_model other(keep);
    for (double * each :
         {&other.n_seen, &other.n_single, &other.n_several, &other.reference_seconds, &other.usual_residual}) {
        *each = *next++;
    }
    std::copy_n(next, n_features, other.unit.begin());
    next += n_features;
    for (sums & each : other.kinds) {
        each.weight = *next++;
        std::copy_n(next, n_features, each.products.begin());
        next += n_features;
        for (vector & row : each.squares) {
            std::copy_n(next, n_features, row.begin());
            next += n_features;
        }
    }
    if (other.n_seen > 0 && (other.reference_seconds <= 0 || other.usual_residual <= 0 ||
                             *std::min_element(other.unit.begin(), other.unit.end()) <= 0 || !other.solve_again())) {
        return false;
    }
    *this = other;
    return true;
}

} // namespace s2moe
