// Whether to draft at all.

#pragma once

#include <span>
#include <vector>

namespace s2moe {

// Compares the seconds per token of steps that drafted with those of plain steps, and drafts only while that pays.
//
//   drafting ──clearly slower than plain──▶ paused ──pause over──▶ probing ──a good comparison──▶ drafting
//                                             ▲                       │
//                                             └─────── otherwise ─────┘ and the next pause is twice as long
//
// Means are over steps, weighed by their tokens, older steps counting less. "Clearly" is 1.5 standard errors of
// the difference over some 100 drafting steps, or 2.5 over the last ten or so; the steps' own scatter gives the error.
// While drafting some steps are plain, or there would be nothing to compare with: every 32nd, or every 8th while the
// comparison is open. A step that takes more than 4 times what is usual for its kind counts as 4 times: one
// stall decides nothing.
//
// Where the costs rule drafting out, whatever is accepted, it pauses as long as they do. But costs of drafts are known
// from drafts alone, and may have been learnt while something else was running, so there are probes after every 1,024
// tokens of that. None of it changes the state above, but its steps count: they are in the means, its plain tokens wait
// for the end of a pause, and a probe that it interrupted goes on with the steps and the loss of the last one. Costs
// may waver, so its tokens add up, from one time to the next, until such a probe, and only the first of these times is
// a pause that is counted.
//
// A pause is 32 tokens, and up to 1,024 while probes fail. A probe is up to 3 drafting steps, and ends early once it
// has lost the seconds of 1.5 plain tokens. Earlier evidence against drafting counts no more than 6 steps in it, and
// half as much as in the probe before, so that a text for which drafting pays again is noticed.
class controller {
  public:
    enum class state { drafting, paused, probing };

    state current() const;
    const char * name() const; // "drafting", "paused", "probing"

    // Whether this step may draft. To be followed by end_step(), or by another begin_step() if the step failed.
    // can_pay: false where the known costs rule drafting out.
    bool begin_step(bool can_pay = true);

    // Whether the last begin_step() was told so.
    bool is_ruled_out() const;

    // What the step took in all. drafted: the draft evaluated anything, whether or not a node was admitted; otherwise
    // the step was a plain one. Steps of no tokens, or whose seconds are not finite and positive, are ignored.
    void end_step(bool drafted, int n_tokens, double seconds);

    // Since the start of the process.
    int n_pauses() const;
    int n_probes() const;

    // Nodes admitted per drafting step, lately.
    double draft_length() const;
    void note_admitted(int n);

    // Seconds per token, lately; 0: unknown.
    double drafting_seconds() const;
    double plain_seconds() const;

    // load() changes nothing and returns false where the numbers are not a state of this version, or not possible.
    std::vector<double> save() const;
    bool load(std::span<const double> state);

  private:
    // Decayed sums over steps of one kind.
    struct record {
        double steps = 0;
        double tokens = 0;
        double seconds = 0;
        double squares = 0; // of a step's deviation from the mean, in seconds, decayed twice as fast

        void add(double n_tokens, double step_seconds, double keep);
        void fade(double keep);
        double mean() const;          // seconds per token
        double squared_error() const; // of the mean
    };

    // Of the difference to the plain mean in standard errors; > 0: drafting is slower.
    double evidence(const record & steps) const;
    bool plain_is_due() const;
    void begin_probe();
    bool probe_is_over() const;
    void judge_probe();
    void pause(bool probe_failed);

    state now = state::drafting;
    record drafting;
    record recent; // of drafting: the last ten steps or so, or the current probe
    record plain;
    double pause_tokens = 0;  // of the current or the last pause; 0: none since drafting last paid
    double waited_tokens = 0; // of the current pause
    bool ruled_out = false;
    bool trying = false;    // a probe while ruled out
    double idle_tokens = 0; // while ruled out, since the last such probe
    double since_plain = 0; // drafting steps since the last plain one
    double probe_steps = 0; // of the current probe
    double probe_loss = 0;  // seconds more than plain tokens would have taken
    double length = 0;
    int pauses = 0;
    int probes = 0;
};

} // namespace s2moe
