// The words of both machines: frames, instructions, and what a peer may do wrong.
//
// This is the native half of `foreprop.core`, which is its specification: the same events give the
// same instructions in the same order (tests/unit/engine/test_native_core.py steps both). Nothing
// here knows a socket, a thread or a clock.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace foreprop {

enum class Kind : std::uint8_t {
    hyperparameters = 4,
    value = 5,
    push = 6,
    reply = 7,
    notify = 8,
    pull = 9,
    norm_part = 24,
    state = 13,
    damaged = 45,
};

using Flags = std::uint32_t;
constexpr Flags no_gradient = 1, value_changed = 2, unchanged = 4, builds_on = 16, gradient = 128,
                measure = 256, averages_residual = 1024 | 16;
constexpr int round_shift = 10;
constexpr std::int64_t most_rounds = 1 << 6;

enum class Order { priority, fifo };
enum class Reply { broadcast, notify, pull };

using Step = std::int64_t;

// A step, and which of its rounds: how often its gradient has been averaged before.
struct Round {
    Step step;
    std::int64_t again;
    auto operator<=>(const Round&) const = default;
};
constexpr Round never{-1, 0};

constexpr int control_priority = -1;

constexpr std::int64_t no_token = -1;

struct Frame {
    int peer;
    int kind;
    Step step;
    int slice;
    int priority;
    Flags flags;
    std::int64_t token;
};

inline Round round_of(const Frame& push) {
    return {push.step, static_cast<std::int64_t>(push.flags >> round_shift)};
}

struct Slice {
    int parameter;
    int server;
};

// What the shell is to do. Fields that an instruction has no use for are 0.
struct Instruction {
    enum What : int { send, complete, finish, update, install, squares, fail };
    What what;
    Frame frame{};                // send; of the others: slice and step, parameter in `slice`
    std::vector<int> ranks{};     // update: who had a gradient, ascending
    bool average = false;         // update: the aggregated gradient is the answer
    bool measured = false;        // update: say what its squares add up to
    int counted = 0;              // update: how many have pushed, with a gradient or not; 0: all
    std::string reason{};         // fail
    int blamed = -1;              // fail
};
using Instructions = std::vector<Instruction>;

inline Instruction sending(const Frame& frame) { return {.what = Instruction::send, .frame = frame}; }
inline Instruction completing(int parameter, Step step) {
    return {.what = Instruction::complete, .frame = {.step = step, .slice = parameter}};
}

// Whose mistake it is. The state is as it was before the event.
struct ProtocolError : std::runtime_error {
    enum Whose : int { local = 1, remote = 2, apart = 3, internal = 4, training = 5 };
    Whose whose;
    ProtocolError(Whose who, const std::string& text) : std::runtime_error(text), whose(who) {}
};

inline std::string text_of(Step number) { return std::to_string(number); }

// `rank 3`, `ranks 1, 3`, and `ranks [1, 3]`, as messages name them.
inline std::string joined(const std::vector<int>& ranks) {
    std::string text;
    for (int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
    return text;
}
inline std::string name_of(int rank) { return "rank " + std::to_string(rank); }
inline std::string listed(const std::vector<int>& ranks) { return "ranks [" + joined(ranks) + "]"; }

}  // namespace foreprop
