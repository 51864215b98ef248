// s2moe_sampler: parameters checked by name, greedy, seeded, biased, constrained.

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "check.h"

namespace {

int32_t status_of(const test_model & m, const char * params) {
    int32_t status = 1;
    s2moe_sampler * sampler = s2moe_sampler_create(m.model.get(), params, nullptr, &status);
    CHECK((sampler != nullptr) == (status == S2MOE_OK));
    s2moe_sampler_free(sampler);
    return status;
}

int32_t draw(const test_model & m, const std::string & params) {
    s2moe_sampler * sampler = s2moe_sampler_create(m.model.get(), params.c_str(), nullptr, nullptr);
    CHECK(sampler != nullptr);
    int32_t token = -1;
    CHECK(s2moe_sampler_sample(sampler, m.ctx.get(), -1, &token) == S2MOE_OK);
    s2moe_sampler_free(sampler);
    return token;
}

void test_parameters_are_checked(const test_model & m) {
    CHECK(status_of(m, "{}") == S2MOE_OK);
    CHECK(status_of(m, "[]") == S2MOE_ERROR_INVALID);
    CHECK(status_of(m, "{") == S2MOE_ERROR_INVALID);
    CHECK(status_of(m, R"({"temperature": null, "top_k": 0})") == S2MOE_OK);
    for (const char * key : {"temperature", "top_p", "top_k", "min_p", "seed", "repeat_penalty", "repeat_last_n"}) {
        for (const char * value : {"-1", "\"1\"", "1e400", "1e30"}) {
            const std::string params = std::string("{\"") + key + "\": " + value + "}";
            CHECK(status_of(m, params.c_str()) == S2MOE_ERROR_INVALID);
        }
        const std::string negative = std::string("{\"") + key + "\": -1}";
        CHECK(status_of(m, negative.c_str()) == S2MOE_ERROR_INVALID);
        CHECK(std::strncmp(s2moe_last_error(), key, std::strlen(key)) == 0);
    }
    CHECK(status_of(m, R"({"logit_bias": [[-1, 1]]})") == S2MOE_ERROR_INVALID);
    CHECK(status_of(m, R"({"logit_bias": [[1]]})") == S2MOE_ERROR_INVALID);
    CHECK(status_of(m, R"({"top_k": 1.5})") == S2MOE_ERROR_INVALID);
    CHECK(status_of(m, R"({"top_k": 2147483647})") == S2MOE_OK);
    CHECK(status_of(m, R"({"grammar": "root ::= ("})") == S2MOE_ERROR_GRAMMAR);
    CHECK(status_of(m, R"({"grammar": "root ::= \"a\"{5,2}"})") == S2MOE_ERROR_GRAMMAR);
    CHECK(status_of(m, R"({"grammar": "root ::= \"a\"{2,5}"})") == S2MOE_OK);
    CHECK(status_of(m, R"({"grammar": "root ::= \"a\"\u0000 \"b\""})") == S2MOE_ERROR_GRAMMAR);
    std::string ambiguous = "root ::= s0";
    for (int i = 0; i < 40; ++i) {
        const std::string next = "s" + std::to_string(i + 1);
        ambiguous += "\\ns" + std::to_string(i) + " ::= " + next + " " + next + " | " + next;
    }
    ambiguous += "\\ns40 ::= \\\"a\\\"?";
    CHECK(status_of(m, ("{\"grammar\": \"" + ambiguous + "\"}").c_str()) == S2MOE_ERROR_GRAMMAR);
    for (const size_t n : {250, 30000, 60000, 1000000}) { // deep enough to end llama.cpp's parser by a stack overflow
        const std::string deep = std::string(n, '(') + "\\\"a\\\"" + std::string(n, ')');
        CHECK(status_of(m, ("{\"grammar\": \"root ::= " + deep + "\"}").c_str()) == S2MOE_ERROR_GRAMMAR);
    }
    CHECK(status_of(m, R"({"grammar": "start ::= \"a\""})") == S2MOE_ERROR_GRAMMAR);
}

void test_choices(const test_model & m) {
    const auto tokens = m.tokens(4);
    CHECK(s2moe_decode(m.ctx.get(), tokens.data(), 4, 0, false) == S2MOE_OK);
    const auto logits = m.logits();
    const auto best = static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
    CHECK(draw(m, R"({"temperature": 0})") == best);
    CHECK(draw(m, R"({"temperature": 5, "top_k": 1})") == best);
    const std::string ban = R"({"temperature": 0, "logit_bias": [[)" + std::to_string(best) + ", -1000]]}";
    CHECK(draw(m, ban) != best);

    const std::string hot = R"({"temperature": 50, "top_k": 0, "top_p": 1, "min_p": 0, "seed": )";
    std::vector<int32_t> first;
    std::vector<int32_t> second;
    for (int seed = 0; seed < 20; ++seed) {
        first.push_back(draw(m, hot + std::to_string(seed) + "}"));
        second.push_back(draw(m, hot + std::to_string(seed) + "}"));
    }
    CHECK(first == second);
    CHECK(*std::min_element(first.begin(), first.end()) != *std::max_element(first.begin(), first.end()));

    s2moe_sampler * sampler = s2moe_sampler_create(m.model.get(), R"({"seed": 4294967294})", nullptr, nullptr);
    CHECK(s2moe_sampler_seed(sampler) == 4294967294u);
    s2moe_sampler_free(sampler);
    sampler = s2moe_sampler_create(m.model.get(), R"({"seed": 4294967295})", nullptr, nullptr);
    CHECK(s2moe_sampler_seed(sampler) == 4294967294u); // never "random" when a seed was given
    int32_t token = 0;
    CHECK(s2moe_sampler_sample(sampler, m.ctx.get(), 0, &token) == S2MOE_ERROR_INVALID);
    const int32_t outside = m.n_vocab();
    CHECK(s2moe_sampler_accept_prompt(sampler, &outside, 1) == S2MOE_ERROR_INVALID);
    s2moe_sampler_free(sampler);
}

void test_repeat_penalty_sees_the_prompt(const test_model & m) {
    const auto logits = m.logits();
    const auto best = static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
    s2moe_sampler * sampler =
        s2moe_sampler_create(m.model.get(), R"({"temperature": 0, "presence_penalty": 1000})", nullptr, nullptr);
    CHECK(s2moe_sampler_accept_prompt(sampler, &best, 1) == S2MOE_OK);
    int32_t token = -1;
    CHECK(s2moe_sampler_sample(sampler, m.ctx.get(), -1, &token) == S2MOE_OK);
    CHECK(token != best);
    s2moe_sampler_free(sampler);
}

// How a sampler fares that chooses from the same logits again and again, until it fails or has chosen n_max times.
int32_t follow(const test_model & m, const std::string & grammar, int n_max) {
    const std::string params = R"({"temperature": 0, "grammar": ")" + grammar + "\"}";
    int32_t status = S2MOE_OK;
    s2moe_sampler * sampler = s2moe_sampler_create(m.model.get(), params.c_str(), nullptr, &status);
    for (int i = 0; i < n_max && status == S2MOE_OK; ++i) {
        int32_t token = -1;
        status = s2moe_sampler_sample(sampler, m.ctx.get(), -1, &token);
    }
    s2moe_sampler_free(sampler);
    return status;
}

// One token of it takes longer than any other grammar's.
std::string longest_step() {
    std::string text = "root ::= (x";
    for (int i = 1; i < 500; ++i) {
        text += " | x";
    }
    text += R"(){0,200}\nx ::= \"a\")";
    for (int i = 1; i < 200; ++i) {
        text += R"( | \")" + std::string(1, static_cast<char>('a' + i % 26)) + R"(\")";
    }
    return text;
}

void test_hopeless_grammars_end_with_an_error(const test_model & m) {
    for (const std::string & grammar : std::vector<std::string>{
             longest_step(),
             R"(root ::= . | . root | . root root | . root root root | [a-z] root root)",
             R"(root ::= b root \"x\" | \"y\"\nb ::= c\nc ::= \"a\"?)",
             R"(root ::= ((([a-z]? [a-y]?){0,30} [a-x]?){0,20} [a-w]?){0,10})",
         }) {
        const auto begun = std::chrono::steady_clock::now();
        CHECK(follow(m, grammar, 40) == S2MOE_ERROR_GRAMMAR);
        CHECK(std::strstr(s2moe_last_error(), "too ambiguous") != nullptr);
        CHECK(std::chrono::steady_clock::now() - begun < std::chrono::seconds(60));
    }
}

void test_work_on_a_grammar_can_be_aborted(const test_model & m) {
    s2moe_abort * abort = s2moe_abort_create(m.ctx.get());
    const std::string params = R"({"temperature": 0, "grammar": ")" + longest_step() + "\"}";
    int32_t status = S2MOE_OK;
    s2moe_abort_request(abort);
    CHECK(s2moe_sampler_create(m.model.get(), params.c_str(), abort, &status) == nullptr);
    CHECK(status == S2MOE_ERROR_ABORTED);
    s2moe_abort_clear(abort);

    s2moe_sampler * sampler = s2moe_sampler_create(m.model.get(), params.c_str(), abort, &status);
    CHECK(sampler != nullptr);
    std::chrono::steady_clock::time_point requested;
    std::thread client([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        requested = std::chrono::steady_clock::now();
        s2moe_abort_request(abort);
    });
    while (status == S2MOE_OK) {
        int32_t token = -1;
        status = s2moe_sampler_sample(sampler, m.ctx.get(), -1, &token);
    }
    const auto answered = std::chrono::steady_clock::now();
    client.join();
    CHECK(status == S2MOE_ERROR_ABORTED);
    CHECK(answered - requested < std::chrono::milliseconds(500));
    s2moe_sampler_free(sampler);
    s2moe_abort_clear(abort);
    CHECK(follow(m, R"(root ::= \"a\"*)", 1) == S2MOE_OK);
    llama_set_abort_callback(m.ctx.get(), nullptr, nullptr);
    s2moe_abort_free(abort);
}

void test_a_grammar_that_failed_fails_at_once(const test_model & m) {
    const char * params = R"({"temperature": 0, "grammar": "root ::= . | . root | . root root | . root root root"})";
    s2moe_sampler * sampler = s2moe_sampler_create(m.model.get(), params, nullptr, nullptr);
    int32_t token = -1;
    while (s2moe_sampler_sample(sampler, m.ctx.get(), -1, &token) == S2MOE_OK) {
    }
    const auto begun = std::chrono::steady_clock::now();
    for (int i = 0; i < 20; ++i) {
        CHECK(s2moe_sampler_sample(sampler, m.ctx.get(), -1, &token) == S2MOE_ERROR_GRAMMAR);
    }
    CHECK(std::chrono::steady_clock::now() - begun < std::chrono::seconds(10));
    s2moe_sampler_free(sampler);
}

void test_ambiguous_grammars_are_followed(const test_model & m) {
    std::string levels = "root ::= s0 s0";
    for (int i = 0; i < 5; ++i) {
        levels += "\\ns" + std::to_string(i) + " ::= s" + std::to_string(i + 1) + " s" + std::to_string(i + 1);
    }
    std::string skipped; // each part may be left out
    for (int i = 0; i < 500; ++i) {
        skipped += "[a-z]? ";
    }
    CHECK(follow(m, levels + R"(\ns5 ::= (\"a\" | \"a\" | \"aa\" | \"a\"*)*)", 20) == S2MOE_OK);
    CHECK(follow(m, "root ::= (" + skipped + ")*", 20) == S2MOE_OK);
    CHECK(follow(m, R"(root ::= (\"a\"?){0,900} \"b\")", 20) == S2MOE_OK);
}

void test_long_grammars_are_followed(const test_model & m) {
    std::string words = "root ::= ";
    for (int i = 0; i < 5000; ++i) {
        words += (i == 0 ? "" : " | ") + std::string(R"(\"w)") + std::to_string(i) + R"(\")";
    }
    CHECK(follow(m, words, 2) == S2MOE_OK);
    CHECK(follow(m, R"(root ::= ([a-z]+ \" \"?){1,200})", 40) == S2MOE_OK);
    CHECK(follow(m, R"(root ::= [a-z]{0,2000} [a-z]{0,2000})", 40) == S2MOE_OK);
    CHECK(follow(m, R"(root ::= \"a\" root \"a\" | \"a\")", 40) == S2MOE_OK);
    CHECK(follow(m, R"(root ::= \"a\" b\nb ::= c b\nc ::= d\nd ::= \"\")", 8) == S2MOE_ERROR_INTERNAL); // no way on
}

} // namespace

int main() {
    const test_model m;
    test_parameters_are_checked(m);
    test_choices(m);
    test_repeat_penalty_sees_the_prompt(m);
    test_hopeless_grammars_end_with_an_error(m);
    test_work_on_a_grammar_can_be_aborted(m);
    test_a_grammar_that_failed_fails_at_once(m);
    test_ambiguous_grammars_are_followed(m);
    test_long_grammars_are_followed(m);
    return 0;
}
