#include "speculation/controller.h"

#include <algorithm>
#include <cmath>

namespace s2moe {

namespace {

constexpr double state_version = 2;

constexpr double drafting_keep = 0.99; // per drafting step
constexpr double recent_keep = 0.9;
constexpr double plain_keep = 0.96; // per plain step; there are fewer of them
constexpr double length_keep = 15.0 / 16;

constexpr double pause_evidence = 1.5; // standard errors
constexpr double recent_pause_evidence = 2.5;
constexpr double resume_evidence = 1;
constexpr double probe_alone_evidence = 3;
constexpr double probe_memory = 6; // drafting steps
constexpr double settled_evidence = 3;

// decayed numbers of steps
constexpr double first_plain_steps = 5; // one of three while there are fewer
constexpr double least_drafting_steps = 3;
constexpr double least_plain_steps = 2.5;
constexpr double open_interval = 8;
constexpr double settled_interval = 32;

constexpr double first_pause_tokens = 32;
constexpr double longest_pause_tokens = 1024;
constexpr double longest_probe_steps = 3;
constexpr double longest_probe_loss = 1.5; // plain tokens

constexpr double stall = 4;            // times the usual seconds per token
constexpr double least_scatter = 0.05; // of a step: a few alike steps prove nothing yet

} // namespace

void controller::record::add(double n_tokens, double step_seconds, double keep) {
    if (steps >= 3) {
        // a step of few tokens may well take as long as a step of many
        step_seconds = std::min(step_seconds, stall * mean() * std::max(n_tokens, tokens / steps));
    }
    fade(keep);
    steps += 1;
    tokens += n_tokens;
    seconds += step_seconds;
    const double expected = mean() * n_tokens;
    const double deviation = std::max(std::abs(step_seconds - expected), least_scatter * expected);
    squares += deviation * deviation;
}

void controller::record::fade(double keep) {
    steps *= keep;
    tokens *= keep;
    seconds *= keep;
    squares *= keep * keep;
}

double controller::record::mean() const {
    return tokens > 0 ? seconds / tokens : 0;
}

double controller::record::squared_error() const {
    if (steps <= 0) {
        return 0;
    }
    // the mean was fitted to the same steps, and a few steps may be alike by chance
    return squares / (tokens * tokens) * (1 + 3 / steps);
}

double controller::evidence(const record & steps) const {
    const double error = std::sqrt(steps.squared_error() + plain.squared_error());
    return error > 0 ? (steps.mean() - plain.mean()) / error : 0;
}

controller::state controller::current() const {
    return !ruled_out ? now : trying ? state::probing : state::paused;
}

bool controller::is_ruled_out() const {
    return ruled_out;
}

const char * controller::name() const {
    switch (current()) {
    case state::paused:
        return "paused";
    case state::probing:
        return "probing";
    default:
        return "drafting";
    }
}

bool controller::plain_is_due() const {
    if (plain.steps < first_plain_steps) {
        return plain.steps == 0 || since_plain >= 2;
    }
    return since_plain + 1 >= (evidence(drafting) < -settled_evidence ? settled_interval : open_interval);
}

void controller::begin_probe() {
    ++probes;
    probe_steps = probe_loss = 0;
}

bool controller::probe_is_over() const {
    return probe_steps >= longest_probe_steps || probe_loss >= longest_probe_loss * plain.mean();
}

bool controller::begin_step(bool can_pay) {
    if (!can_pay) {
        if (!ruled_out && now == state::drafting && idle_tokens == 0) { // costs may waver
            ++pauses;
        }
        ruled_out = true;
        if (idle_tokens >= longest_pause_tokens && !trying) {
            trying = true;
            begin_probe();
        }
        return trying;
    }
    if (trying) { // not again soon if costs waver
        idle_tokens = 0;
    }
    ruled_out = trying = false;
    if (now == state::paused && waited_tokens >= pause_tokens) {
        now = state::probing;
        begin_probe();
        recent = {};
        drafting.fade(std::min(0.5, probe_memory / std::max(drafting.steps, probe_memory)));
    }
    return now == state::probing || (now == state::drafting && !plain_is_due());
}

void controller::end_step(bool drafted, int n_tokens, double seconds) {
    if (n_tokens < 1 || !std::isfinite(seconds) || seconds <= 0) {
        return;
    }
    if (!drafted) {
        plain.add(n_tokens, seconds, plain_keep);
        since_plain = 0;
        if (now == state::paused) {
            waited_tokens += n_tokens;
        }
        if (ruled_out) {
            idle_tokens += n_tokens;
        }
        return;
    }
    drafting.add(n_tokens, seconds, drafting_keep);
    recent.add(n_tokens, seconds, recent_keep);
    ++since_plain;
    ++probe_steps;
    probe_loss += seconds - plain.mean() * n_tokens;
    if (ruled_out) {
        if (probe_is_over()) {
            trying = false;
            idle_tokens = 0;
        }
    } else if (now == state::probing) {
        judge_probe();
    } else if (now == state::drafting && recent.steps >= least_drafting_steps && plain.steps >= least_plain_steps &&
               (evidence(drafting) > pause_evidence || evidence(recent) > recent_pause_evidence)) {
        pause(false);
    }
}

void controller::judge_probe() {
    if (!probe_is_over()) {
        return;
    }
    if (evidence(recent) < -probe_alone_evidence) {
        drafting = recent;
    } else if (evidence(drafting) > -resume_evidence) {
        pause(true);
        return;
    }
    now = state::drafting;
    pause_tokens = 0;
}

void controller::pause(bool probe_failed) {
    now = state::paused;
    waited_tokens = 0;
    pause_tokens = probe_failed ? std::min(2 * pause_tokens, longest_pause_tokens) : first_pause_tokens;
    if (!probe_failed) {
        ++pauses;
    }
}

int controller::n_pauses() const {
    return pauses;
}

int controller::n_probes() const {
    return probes;
}

double controller::draft_length() const {
    return length;
}

void controller::note_admitted(int n) {
    length = length_keep * length + (1 - length_keep) * n;
}

double controller::drafting_seconds() const {
    return drafting.mean();
}

double controller::plain_seconds() const {
    return plain.mean();
}

std::vector<double> controller::save() const {
    // a probe that was going on is repeated
    const double which = now == state::drafting ? 0 : 1;
    std::vector<double> numbers{state_version,
                                which,
                                pause_tokens,
                                now == state::probing ? pause_tokens : waited_tokens,
                                idle_tokens,
                                since_plain,
                                length};
    for (const record & each : {drafting, recent, plain}) {
        numbers.insert(numbers.end(), {each.steps, each.tokens, each.seconds, each.squares});
    }
    return numbers;
}

bool controller::load(std::span<const double> numbers) {
    if (numbers.size() != 19 || numbers[0] != state_version || (numbers[1] != 0 && numbers[1] != 1) ||
        !std::all_of(numbers.begin(), numbers.end(), [](double value) { return std::isfinite(value) && value >= 0; })) {
        return false;
    }
    controller other;
    other.now = numbers[1] == 0 ? state::drafting : state::paused;
    other.pause_tokens = std::min(numbers[2], longest_pause_tokens);
    other.waited_tokens = numbers[3];
    other.idle_tokens = numbers[4];
    other.since_plain = numbers[5];
    other.length = numbers[6];
    other.drafting = {numbers[7], numbers[8], numbers[9], numbers[10]};
    other.recent = {numbers[11], numbers[12], numbers[13], numbers[14]};
    other.plain = {numbers[15], numbers[16], numbers[17], numbers[18]};
    for (const record & each : {other.drafting, other.recent, other.plain}) {
        if ((each.steps > 0) != (each.tokens > 0) || (each.steps > 0) != (each.seconds > 0)) {
            return false;
        }
    }
    other.pauses = pauses;
    other.probes = probes;
    *this = other;
    return true;
}

} // namespace s2moe
