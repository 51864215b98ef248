// The gate's kernel, computed by the CPU in the place of a GPU.

#include <algorithm>
#include <cstring>

#include "speculation/gate_device.h"

namespace s2moe {

namespace {

class host_gate final : public gate_device {
  public:
    host_gate(int n_layer, int n_expert, int n_ids)
        : n_layer(n_layer), n_expert(n_expert), n_ids(n_ids), residency(n_layer * n_expert),
          exact(static_cast<size_t>(n_layer) * max_gate_rows * n_ids), chosen(exact.size()) {
    }

    void begin(const gate_control & next, const uint8_t * resident) override {
        control = next;
        std::copy_n(resident, residency.size(), residency.begin());
        std::fill(exact.begin(), exact.end(), -1);
        std::fill(chosen.begin(), chosen.end(), -1);
        std::fill(std::begin(accounts), std::end(accounts), gate_account{});
    }

    gate_outcome read(int n_rows) override {
        gate_outcome outcome;
        outcome.n_ids = n_ids;
        outcome.accounts.assign(accounts, accounts + n_rows);
        for (int layer = 0; layer < n_layer; ++layer) {
            const auto from = static_cast<ptrdiff_t>(layer) * max_gate_rows * n_ids;
            outcome.exact.insert(outcome.exact.end(), exact.begin() + from, exact.begin() + from + n_rows * n_ids);
            outcome.chosen.insert(outcome.chosen.end(), chosen.begin() + from, chosen.begin() + from + n_rows * n_ids);
        }
        return outcome;
    }

    bool run_on_host(ggml_tensor * dst, const llama_moe_gate_layer & of) override {
        if (!gate_rule_fits(dst)) {
            return false;
        }
        const gate_layer layer =
            gate_layer_of(gate_call_of(dst, of), n_expert, n_ids, residency.data(), exact.data(), chosen.data());
        one_lane lanes;
        gate_memory memory{};
        gate_layer_rows(lanes, control, layer, accounts, memory);
        return true;
    }

  private:
    const int n_layer;
    const int n_expert;
    const int n_ids;
    gate_control control;
    gate_account accounts[max_gate_rows];
    std::vector<uint8_t> residency; // [n_layer][n_expert]
    std::vector<int32_t> exact;     // [n_layer][max_gate_rows][n_ids]
    std::vector<int32_t> chosen;
};

} // namespace

std::unique_ptr<gate_device> create_host_gate(int n_layer, int n_expert, int n_ids) {
    return std::make_unique<host_gate>(n_layer, n_expert, n_ids);
}

} // namespace s2moe
