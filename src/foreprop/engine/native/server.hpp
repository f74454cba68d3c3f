// `core.server_machine` with the rule `core.closing.AllMembers`: what a server combines and sends
// next, where every worker pushes every round.
#pragma once

#include <deque>
#include <map>
#include <set>

#include "lanes.hpp"

namespace foreprop {

struct ServerSetting {
    int index;
    int workers;
    Order order;
    Reply reply;
    Turns turns;
    std::vector<int> slices;                // this server's, ascending
    std::vector<std::string> names;         // of their parameters
};

class ServerMachine {
  public:
    explicit ServerMachine(ServerSetting setting)
        : index_(setting.index),
          workers_(setting.workers),
          reply_(setting.reply),
          updates_(setting.order),
          lanes_(setting.order, setting.turns) {
        for (std::size_t place = 0; place < setting.slices.size(); ++place)
            states_[setting.slices[place]].name = setting.names[place];
        for (auto& [number, state] : states_) state.what = "slice " + text_of(number) + " of " + state.name;
    }

    // Events.
    Instructions push_arrived(int rank, int slice, Step step, int priority, Flags flags) {
        State& state = state_of(slice);
        const Round at{step, static_cast<std::int64_t>(flags >> round_shift)};
        check_rank(rank);
        if (left_.contains(rank))
            throw refused(rank, "pushed a slice of " + state.name + " after its goodbye");
        if (state.pushed.empty() ? at <= state.done || !step
                                 : at != state.round || state.pushed.contains(rank)) {
            throw misplaced(state, rank, at);
        }
        if (state.pushed.empty() || priority < state.priority) state.priority = priority;
        state.round = at;
        state.pushed[rank] = flags;
        if (static_cast<int>(state.pushed.size()) < workers_) return replying(missing_for_ever(state));
        std::vector<int> ranks;
        Flags any = 0, all = ~0u;
        for (const auto& [peer, its] : state.pushed) {
            if (!(its & no_gradient)) ranks.push_back(peer);
            any |= its;
            all &= its;
        }
        if ((any ^ all) & value_changed) return replying({unlike_values(state)});
        if ((any ^ all) & gradient) return replying({unlike_updates(state)});
        Instruction update{.what = Instruction::update,
                           .frame = {.step = step, .slice = slice},
                           .ranks = std::move(ranks),
                           .average = (flags & gradient) != 0,
                           .measured = (flags & measure) != 0};
        updates_.push(step, state.priority, std::move(update));
        return replying(next_update());
    }

    // `measured`: the shell has the sums of squares of what it has averaged.
    Instructions slice_updated(bool measured) {
        if (!is_updating_)
            throw ProtocolError(ProtocolError::internal, "an update finished that nobody started");
        const Instruction update = std::move(updating_);
        is_updating_ = false;
        State& state = states_.at(update.frame.slice);
        const bool is_valued = state.valued == update.frame.step && !update.average;
        const Flags flags = update.ranks.empty() && !is_valued ? unchanged : 0;
        Instructions told;
        if (!measured) {
            answer(state, update, flags);
        } else {
            measured_.emplace(update.frame.slice, std::pair{update, flags});
            // No average goes back before the norm can be known: see `_note_squares`.
            if (measured_.size() == states_.size()) {
                told.push_back({.what = Instruction::squares, .frame = {.step = update.frame.step}});
                for (auto& [slice, held] : std::exchange(measured_, {}))
                    answer(states_.at(slice), held.first, held.second);
            }
        }
        told = replying(std::move(told));
        for (auto& each : next_update()) told.push_back(std::move(each));
        return told;
    }

    Instructions value_arrived(int rank, int slice, Step step, int priority) {
        State& state = state_of(slice);
        if (rank != 0) {
            throw ProtocolError(ProtocolError::remote,
                                name_of(rank) + " sent parameter values; only rank 0 may");
        }
        if (step <= std::max(state.done.step, state.valued) || state.pushed.contains(0)) {
            const std::string late = step <= state.done.step
                                         ? "step " + text_of(state.done.step) + " is done"
                                         : "twice or late";
            throw ProtocolError(ProtocolError::remote, "values for " + state.what +
                                                           " came for step " + text_of(step) +
                                                           ": " + late);
        }
        state.valued = step;
        if (step) return {};
        state.done = {0, 0};
        state.priority = priority;
        for (int other = 1; other < workers_; ++other)
            send(Kind::reply, other, 0, slice, priority, 0);
        return replying({{.what = Instruction::install, .frame = {.slice = slice}}});
    }

    Instructions pull_arrived(int rank, int slice, Step step, int priority) {
        State& state = state_of(slice);
        check_rank(rank);
        const std::string what = name_of(rank) + " pulled slice " + text_of(slice);
        if (reply_ == Reply::broadcast)
            throw ProtocolError(ProtocolError::remote, what + "; replies are broadcast");
        if (std::find(state.pulls.begin(), state.pulls.end(), std::pair{rank, step}) !=
            state.pulls.end()) {
            throw ProtocolError(ProtocolError::remote, what + " twice in step " + text_of(step));
        }
        const bool pushed = state.round.step == step && state.pushed.contains(rank);
        if (!pushed && step != state.done.step) {
            throw ProtocolError(ProtocolError::remote,
                                what + " for step " + text_of(step) +
                                    ", which it has not pushed; step " + text_of(state.done.step) +
                                    " is done");
        }
        if (pushed) {
            state.pulls.emplace_back(rank, step);
        } else {
            send(Kind::reply, rank, step, slice, priority, state.unchanged);
        }
        return replying({});
    }

    Instructions frame_sent(int peer) {
        Instructions out;
        lanes_.sent(peer, out);
        return out;
    }

    Instructions message_ready(const Frame& message) {
        lanes_.push(message);
        Instructions out;
        lanes_.depart(out);
        return out;
    }

    Instructions peer_left(int rank) {
        left_.insert(rank);
        for (auto& [number, state] : states_) {
            if (Instructions failure = missing_for_ever(state); !failure.empty())
                return replying(std::move(failure));
        }
        Instructions out = replying({});
        if (out.empty() && static_cast<int>(left_.size()) == workers_)
            out.push_back({.what = Instruction::finish});
        return out;
    }

    int queue_depth() const { return lanes_.queued; }

    // What is known of each slice, for reports.
    template <class See>
    void each(See see) const {
        for (const auto& [slice, state] : states_)
            see(slice, state.priority, state.done, state.round, state.pushed);
    }

  private:
    struct State {
        std::string name, what;
        Round done = never;
        Round round = never;                     // the one that is being collected
        std::map<int, Flags> pushed;     // its pushes' flags, by rank
        int priority = 0;
        Step valued = -1;
        std::vector<std::pair<int, Step>> pulls; // that came before the update
        Flags unchanged = 0;             // the flag, if there is no average to be pulled
    };

    State& state_of(int slice) {
        const auto found = states_.find(slice);
        if (found == states_.end()) {
            throw ProtocolError(ProtocolError::remote, "slice " + text_of(slice) +
                                                           " does not belong to server " +
                                                           text_of(index_));
        }
        return found->second;
    }
    void check_rank(int rank) const {
        if (rank < 0 || rank >= workers_) {
            throw ProtocolError(ProtocolError::remote, name_of(rank) + " of a world of " +
                                                           text_of(workers_));
        }
    }

    Instructions next_update() {
        if (is_updating_ || updates_.empty()) return {};
        updating_ = updates_.pop();
        is_updating_ = true;
        return {updating_};
    }

    void answer(State& state, const Instruction& update, Flags flags) {
        const Step step = update.frame.step;
        const int slice = update.frame.slice;
        state.done = state.round;
        state.pushed.clear();
        state.round = never;
        state.unchanged = update.average ? flags : 0;
        if (reply_ == Reply::pull) {
            for (const auto& [rank, _pulled] : std::exchange(state.pulls, {}))
                send(Kind::reply, rank, step, slice, state.priority, state.unchanged);
            return;
        }
        const Kind kind = reply_ == Reply::notify ? Kind::notify : Kind::reply;
        for (int rank = 0; rank < workers_; ++rank)
            send(kind, rank, step, slice, state.priority, flags);
    }

    void send(Kind kind, int rank, Step step, int slice, int priority, Flags flags) {
        lanes_.push({rank, static_cast<int>(kind), step, slice, priority, flags, no_token});
    }
    Instructions replying(Instructions out) {
        if (lanes_.queued) lanes_.depart(out);
        return out;
    }

    // What does not fit.
    ProtocolError refused(int rank, const std::string& why) const {
        return {ProtocolError::remote, name_of(rank) + " " + why};
    }
    ProtocolError misplaced(const State& state, int rank, Round at) const {
        const Round here = state.pushed.empty() ? at : state.round;
        if (state.pushed.contains(rank))
            return refused(rank, "pushed " + state.what + " twice in step " + text_of(here.step));
        if (!at.step || at <= state.done) {
            return refused(rank, "pushed " + state.what + " for step " + text_of(at.step) +
                                     ", which is past: step " + text_of(state.done.step) +
                                     " is done");
        }
        const std::string others = listed(having(state, 0, 0));
        if (at.step != here.step) {
            return {ProtocolError::apart,
                    name_of(rank) + " pushed " + state.what + " for step " + text_of(at.step) +
                        " while " + others + " are at step " + text_of(here.step) +
                        ": all ranks must make the same number of steps. One that catches an error"
                        " or skips a batch must do so on every rank alike"};
        }
        return {ProtocolError::apart,
                name_of(rank) + " has averaged the gradient of " + state.name + " " +
                    text_of(at.again) + " times before in step " + text_of(at.step) + ", " + others +
                    " " + text_of(here.again) +
                    " times: run as many backward passes on every rank, and read gradients between"
                    " them on every rank alike"};
    }

    // The ranks whose push has these bits of `mask`.
    static std::vector<int> having(const State& state, Flags mask, Flags bits) {
        std::vector<int> ranks;
        for (const auto& [rank, flags] : state.pushed)
            if ((flags & mask) == bits) ranks.push_back(rank);
        return ranks;
    }
    static Instruction failing(std::string reason, int blamed, Step step) {
        return {.what = Instruction::fail,
                .frame = {.step = step},
                .reason = std::move(reason),
                .blamed = blamed};
    }
    static Instruction unlike_values(const State& state) {
        return failing("parameter " + state.name + " was changed by hand before step " +
                           text_of(state.round.step) + " on " +
                           listed(having(state, value_changed, value_changed)) + " but not on " +
                           listed(having(state, value_changed, 0)) +
                           ": change it on every rank alike",
                       -1, state.round.step);
    }
    static Instruction unlike_updates(const State& state) {
        return failing(listed(having(state, gradient, gradient)) + " update " + state.name +
                           " themselves in step " + text_of(state.round.step) + ", but " +
                           listed(having(state, gradient, 0)) +
                           " leave it to the servers: the loop must use gradients alike on every"
                           " rank; or set update='workers'",
                       -1, state.round.step);
    }
    // Fails if somebody has left who will never push what the others have pushed.
    Instructions missing_for_ever(const State& state) const {
        if (left_.empty() || state.pushed.empty()) return {};
        for (int rank = 0; rank < workers_; ++rank) {
            if (state.pushed.contains(rank) || !left_.contains(rank)) continue;
            return {failing(name_of(rank) + " has left the session, but " +
                                listed(having(state, 0, 0)) + " are at step " +
                                text_of(state.round.step) + " and need its gradient of " +
                                state.name +
                                ": all ranks must make the same number of steps",
                            rank, state.round.step - 1)};
        }
        return {};
    }

    int index_;
    int workers_;
    Reply reply_;
    std::map<int, State> states_;  // by slice
    std::set<int> left_;
    SendQueue<Instruction> updates_;
    bool is_updating_ = false;
    Instruction updating_{};
    std::map<int, std::pair<Instruction, Flags>> measured_;
    SendLanes lanes_;
};

}  // namespace foreprop
