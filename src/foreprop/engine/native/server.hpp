// `core.server_machine`: what a server combines and sends next. A round closes when all have pushed
// it (`core.closing.AllMembers`), or in an elastic session all members of its step
// (`core.firstmembers.FirstMembers`).
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <set>

#include "lanes.hpp"
#include "members.hpp"

namespace foreprop {

struct ServerSetting {
    int index;
    int workers;
    int started;   // so many of them are here at the start
    bool elastic;  // others may come, and any may be lost
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
          elastic_(setting.elastic),
          members_(setting.workers, setting.started),
          reply_(setting.reply),
          updates_(setting.order),
          lanes_(setting.order, setting.turns) {
        for (std::size_t place = 0; place < setting.slices.size(); ++place)
            begin(setting.slices[place], setting.names[place]);
    }

    // Events.
    Instructions push_arrived(int rank, int slice, Step step, int priority, Flags flags) {
        State& state = state_of(slice);
        const Round at{step, static_cast<std::int64_t>(flags >> round_shift)};
        check_rank(rank);
        if (elastic_) {
            if (!members_.here.contains(rank)) return {};  // it has been dropped
            check_turn(state, slice, rank, at);
            state.last[static_cast<std::size_t>(rank)] = at;
        } else if (members_.left.contains(rank)) {
            throw refused(rank, "pushed a slice of " + state.name + " after its goodbye");
        } else if (state.pushed.empty() ? at <= state.done || !step
                                        : at != state.round || state.pushed.contains(rank)) {
            throw misplaced(state, rank, at);
        }
        if (state.pushed.empty() || priority < state.priority) state.priority = priority;
        state.round = at;
        state.pushed[rank] = state.latest = flags;
        return replying(close_if_complete(slice, state));
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
        state.is_closed = false;
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
        for (int other : members_.here)
            if (other && members_.counts(other, 0)) send(Kind::reply, other, 0, slice, priority, 0);
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
        const bool is_known = members_.here.contains(rank);
        if (is_known) members_.left.insert(rank);
        for (auto& [number, state] : states_) {
            if (!is_known) break;  // it has been dropped
            if (Instructions failure = missing_for_ever(state); !failure.empty())
                return replying(std::move(failure));
        }
        Instructions out = replying({});
        if (out.empty() && members_.all_left()) out.push_back({.what = Instruction::finish});
        return out;
    }

    // Members that go and come. What they change closes rounds in `go_on` alone, so that the shell
    // can tell the members before any answer that has been made without, or with, such a rank.
    Departure peer_dropped(int rank) {
        Departure found{.slices = static_cast<int>(states_.size())};
        is_held_ = true;
        if (!members_.here.contains(rank)) return found;
        found.is_told = !members_.promised.contains(rank);
        const auto at = static_cast<std::size_t>(rank);
        for (const auto& [_, state] : states_) found.step = std::max(found.step, state.last[at].step);
        const bool has_begun = found.step >= members_.first_step(rank);
        members_.drop(rank);
        for (auto& [_, state] : states_) {
            if (state.pushed.contains(rank)) state.unowed.insert(rank);
            found.counted += has_begun && state.last[at].step == found.step;
            // a round that no member has pushed is forgotten
            const auto is_here = [&](const auto& push) { return members_.here.contains(push.first); };
            if (state.pushed.empty() || state.is_closed ||
                std::any_of(state.pushed.begin(), state.pushed.end(), is_here))
                continue;
            found.counted -= state.round.step == found.step && state.pushed.contains(rank);
            state.pushed.clear();
            state.unowed.clear();
            state.round = never;
        }
        return found;
    }
    Promise join_asked(int rank, Step step) {
        check_rank(rank);
        is_held_ = true;
        if (members_.promised.contains(rank)) members_.drop(rank);
        Promise found;
        Step pushed = 0;
        for (const auto& [_, state] : states_) {
            const Step closed = state.is_closed ? state.round.step : 0;
            found.newest = std::max({found.newest, state.done.step, closed});
            pushed = std::max(pushed, state.last[static_cast<std::size_t>(rank)].step);
        }
        found.least = std::max(found.newest + Members::lead_steps, pushed) + 1;
        found.ending = !members_.left.empty();
        if (step < found.least || found.ending) return found;
        found.step = members_.promised[rank] = step;
        members_.here.insert(rank);
        members_.since[rank] = step - Members::lead_steps;
        for (auto& [_, state] : states_)  // it pushes nothing of a step before
            state.last[static_cast<std::size_t>(rank)] = {step - 1, most_rounds};
        return found;
    }
    void join_settled(int rank, Step step) {
        is_held_ = true;
        members_.promised.erase(rank);
        members_.since[rank] = step;
    }
    Instructions go_on() {
        is_held_ = false;
        Instructions told;
        for (auto& [slice, state] : states_) {
            for (auto& each : close_if_complete(slice, state)) told.push_back(std::move(each));
            if (!told.empty() && told.back().what == Instruction::fail) break;
        }
        return replying(std::move(told));
    }
    // It is this server's from now on, and goes on after this round (`core.takeover`).
    void slice_settled(int slice, const std::string& name, Round after) {
        if (!states_.contains(slice)) begin(slice, name);
        State& state = states_.at(slice);
        state.done = after;
        state.counted.clear();  // another server may have counted others meanwhile
    }
    bool is_here(int rank) const { return members_.here.contains(rank); }
    bool owns(int slice) const { return states_.contains(slice); }
    // Who is sent the average of the round that is being combined.
    std::vector<int> answered(int slice) const {
        std::vector<int> ranks;
        const State& state = states_.at(slice);
        for (const auto& [rank, _] : state.pushed)
            if (!state.unowed.contains(rank)) ranks.push_back(rank);
        return ranks;
    }
    // Whose pushes have closed its round, if they are not those of the round before.
    std::optional<std::vector<int>> changed_set(int slice) {
        State& state = states_.at(slice);
        std::vector<int> counted;
        for (const auto& [rank, _] : state.pushed) counted.push_back(rank);
        if (counted == state.counted) return std::nullopt;
        state.counted = counted;
        return counted;
    }
    bool has_sent_all(int rank) const { return lanes_.is_idle(rank); }

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
        Flags latest = 0;                // the last push's
        int priority = 0;
        std::set<int> unowed;            // who has been dropped since
        bool is_closed = false;          // and not combined yet
        std::vector<Round> last;         // that each rank has pushed
        std::vector<int> counted;        // in the last round that was closed
        Step valued = -1;
        std::vector<std::pair<int, Step>> pulls; // that came before the update
        Flags unchanged = 0;             // the flag, if there is no average to be pulled
    };

    void begin(int slice, const std::string& name) {
        State& state = states_[slice];
        state.name = name;
        state.what = "slice " + text_of(slice) + " of " + name;
        state.last.assign(static_cast<std::size_t>(members_.workers), Round{0, 0});
        state.counted.assign(members_.here.begin(), members_.here.end());
    }
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
        if (rank < 0 || rank >= members_.workers) {
            throw ProtocolError(ProtocolError::remote, name_of(rank) + " of a world of " +
                                                           text_of(members_.workers));
        }
    }

    Instructions close_if_complete(int slice, State& state) {
        if (state.pushed.empty() || state.is_closed || is_held_) return {};
        if (members_.since.empty() && state.pushed.size() < members_.here.size())
            return missing_for_ever(state);
        for (int rank : members_.here)
            if (members_.counts(rank, state.round.step) && !state.pushed.contains(rank))
                return missing_for_ever(state);
        std::vector<int> ranks;
        Flags any = 0, all = ~0u;
        for (const auto& [peer, its] : state.pushed) {
            if (!(its & no_gradient)) ranks.push_back(peer);
            any |= its;
            all &= its;
        }
        if ((any ^ all) & value_changed) return {unlike_values(state)};
        if ((any ^ all) & gradient) return {unlike_updates(state)};
        state.is_closed = true;
        Instruction update{.what = Instruction::update,
                           .frame = {.step = state.round.step, .slice = slice},
                           .ranks = std::move(ranks),
                           .average = (any & gradient) != 0,
                           .measured = !elastic_ && (state.latest & measure),
                           .counted = elastic_ ? static_cast<int>(state.pushed.size()) : 0};
        updates_.push(state.round.step, state.priority, std::move(update));
        return next_update();
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
        const auto ranks = answered(slice);
        state.pushed.clear();
        state.unowed.clear();
        state.round = never;
        state.unchanged = update.average ? flags : 0;
        if (reply_ == Reply::pull) {
            for (const auto& [rank, _pulled] : std::exchange(state.pulls, {}))
                send(Kind::reply, rank, step, slice, state.priority, state.unchanged);
            return;
        }
        const Kind kind = reply_ == Reply::notify ? Kind::notify : Kind::reply;
        for (int rank : ranks) send(kind, rank, step, slice, state.priority, flags);
    }

    void send(Kind kind, int rank, Step step, int slice, int priority, Flags flags) {
        lanes_.push({rank, static_cast<int>(kind), step, slice, priority, flags, no_token});
    }
    Instructions replying(Instructions out) {
        if (lanes_.queued) lanes_.depart(out);
        return out;
    }

    // What does not fit.
    void check_turn(const State& state, int slice, int rank, Round at) const {
        const auto refuse = [&](const std::string& why,
                                ProtocolError::Whose whose = ProtocolError::remote) {
            throw ProtocolError(whose, name_of(rank) + " pushed slice " + text_of(slice) + " of " +
                                           state.name + " for " + name_of(at) + why);
        };
        const Round last = state.last[static_cast<std::size_t>(rank)];
        if (members_.left.contains(rank)) refuse(" after its goodbye");
        if (at <= last) refuse(" after " + name_of(last));
        // it was lost to the others, at a server that is lost: they have gone on without it
        if (at <= state.done || (state.is_closed && at == state.round)) refuse(", which is past");
        if (!state.pushed.empty() && at != state.round) {
            refuse(" while " + name_of(state.round) +
                       " is open: all ranks must make the same number of steps, and of backward"
                       " passes in each",
                   ProtocolError::apart);
        }
    }
    static std::string name_of(Round at) {
        const bool is_again = at.again > 0 && at.again < most_rounds;
        return "step " + text_of(at.step) + (is_again ? ", round " + text_of(at.again + 1) : "");
    }
    static std::string name_of(int rank) { return foreprop::name_of(rank); }
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
        if (members_.left.empty() || state.pushed.empty() || state.is_closed) return {};
        for (int rank : members_.left) {
            if (state.pushed.contains(rank) || !members_.counts(rank, state.round.step)) continue;
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
    bool elastic_;
    Members members_;
    bool is_held_ = false;  // no round closes before `go_on`
    Reply reply_;
    std::map<int, State> states_;  // by slice
    SendQueue<Instruction> updates_;
    bool is_updating_ = false;
    Instruction updating_{};
    std::map<int, std::pair<Instruction, Flags>> measured_;
    SendLanes lanes_;
};

}  // namespace foreprop
