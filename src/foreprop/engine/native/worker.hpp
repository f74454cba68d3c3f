// `core.worker_machine`: what a worker sends next, and when a parameter is complete.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>

#include "lanes.hpp"

namespace foreprop {

struct WorkerSetting {
    std::vector<Slice> slices;
    int parameters;
    Order order;
    Reply reply;
    Turns turns;
    std::vector<std::vector<int>> packs;  // of parameters: as urgent as their most urgent
    bool outlives = false;                // servers may be lost
    std::vector<std::int64_t> window_sizes_bytes;  // by slice; empty: pushes never wait
    std::int64_t window_bytes = 0;
    int window_servers = 1;
};

class WorkerMachine {
  public:
    explicit WorkerMachine(WorkerSetting setting)
        : slices_(std::move(setting.slices)),
          packs_(std::move(setting.packs)),
          reply_(setting.reply),
          outlives_(setting.outlives),
          window_(make_window(setting)),
          lanes_(setting.order, setting.turns, make_guard(window_.get())),
          slices_of_(setting.parameters),
          priority_(setting.parameters),
          urgency_(setting.parameters),
          missing_(setting.parameters, 0),
          step_(setting.parameters, 0),
          notified_(setting.parameters),
          awaited_step_(slices_.size(), not_awaited) {
        for (int number = 0; number < static_cast<int>(slices_.size()); ++number) {
            slices_of_[slices_[number].parameter].push_back(number);
            owner_.push_back(slices_[number].server);
        }
        for (int number = 0; number < setting.parameters; ++number)
            priority_[number] = urgency_[number] = number;
        if (outlives_) answered_round_.assign(slices_.size(), Round{0, 0});
    }

    // Events.
    Instructions gradient_ready(int parameter, Step step, Flags flags, bool with_value) {
        if (missing_[parameter]) throw pending(parameter, step, step_[parameter]);
        const auto& pieces = slices_of_[parameter];
        const int priority = urgency_[parameter];
        missing_[parameter] = static_cast<int>(pieces.size());
        step_[parameter] = step;
        for (int index : pieces) {
            const Frame push = frame(Kind::push, owner_[index], step, index, priority, flags);
            if (outlives_) {
                open_[index] = push;
                if (claimed_.contains(index)) continue;
            }
            if (with_value) lanes_.push(frame(Kind::value, owner_[index], step, index, priority));
            lanes_.push(push);
            if (reply_ == Reply::pull) pulls_.push_back(pull_of(index));
        }
        if (pieces.empty()) return {completing(parameter, step)};
        return departing();
    }

    Instructions values_offered() {
        for (int index = 0; index < static_cast<int>(slices_.size()); ++index) {
            const Slice& piece = slices_[index];
            lanes_.push(frame(Kind::value, piece.server, 0, index, urgency_[piece.parameter]));
        }
        return departing();
    }

    Instructions values_awaited(Step step) {
        Instructions done;
        for (int parameter = 0; parameter < static_cast<int>(slices_of_.size()); ++parameter) {
            const auto& pieces = slices_of_[parameter];
            missing_[parameter] = static_cast<int>(pieces.size());
            step_[parameter] = step;
            if (pieces.empty()) done.push_back(completing(parameter, step));
            for (int index : pieces) await(index, step);
        }
        return done;
    }

    Instructions message_ready(const Frame& message) {
        lanes_.push(message);
        return departing();
    }

    Instructions frame_sent(int server) {
        Instructions out;
        lanes_.sent(server, out);
        return left(std::move(out));
    }

    Instructions reply_arrived(int slice, Step step, int server, Flags flags) {
        const bool expected = awaits(slice, step);
        if (!expected || owner_[slice] != server)
            throw unexpected(slice, step, server, "reply", expected);
        if (auto push = open_.find(slice); outlives_ && push != open_.end()) {  // else the start
            answered_round_[slice] = round_of(push->second);
            open_.erase(push);
            if (flags & unchanged) {
                unchanged_.insert(slice);
            } else {
                unchanged_.erase(slice);
            }
        }
        Instructions done = answered(slice);
        if (!window_) return done;
        window_->answered(slice);
        Instructions more;
        lanes_.depart_to(server, more);
        for (auto& each : left(std::move(more))) done.push_back(std::move(each));
        return done;
    }

    // KVStore pulls an array once all its parts have been announced (P3 section 4.2).
    Instructions notify_arrived(int slice, Step step, int server, Flags flags) {
        const bool known = reply_ == Reply::notify && is_slice(slice);
        const bool expected = known && step > 0 && step == awaited_step_[slice];
        if (!expected || slices_[slice].server != server)
            throw unexpected(slice, step, server, "notification", expected);
        if (announced_.contains(slice)) {
            throw ProtocolError(ProtocolError::remote, "server " + text_of(server) +
                                                           " announced slice " + text_of(slice) +
                                                           " twice");
        }
        if (flags & unchanged) return answered(slice);
        const int parameter = slices_[slice].parameter;
        announced_.insert(slice);
        notified_[parameter].push_back(slice);
        return pull_if_all_notified(parameter);
    }

    Instructions pulls_due() {
        for (const Frame& pull : std::exchange(pulls_, {})) lanes_.push(pull);
        return departing();
    }

    Instructions priorities_learned(const std::vector<int>& order) {
        std::vector<int> sorted(order), expected(priority_.size());
        std::sort(sorted.begin(), sorted.end());
        for (int number = 0; number < static_cast<int>(expected.size()); ++number)
            expected[number] = number;
        if (sorted != expected) {
            throw ProtocolError(ProtocolError::local, "priorities must name every parameter once");
        }
        for (int priority = 0; priority < static_cast<int>(order.size()); ++priority)
            priority_[order[priority]] = urgency_[order[priority]] = priority;
        for (const auto& pack : packs_) {
            int least = priority_[pack.front()];
            for (int member : pack) least = std::min(least, priority_[member]);
            urgency_[pack.front()] = least;
        }
        return {};
    }

    Instructions came_after(Step step) {
        came_after_ = step;
        return {};
    }

    Instructions closing() {
        closing_ = true;
        return departing();
    }

    // A server is gone (-1: none is, slices move), and these are not to be pushed before they are
    // settled; then they go on at their owners after these rounds.
    Instructions slices_lost(int server, const std::vector<std::pair<int, int>>& owners) {
        if (server >= 0) {
            lanes_.forget(server);
            if (window_) window_->forget(server);
        }
        for (const auto& [slice, owner] : owners) {
            owner_[slice] = owner;
            claimed_.insert(slice);
        }
        return departing();
    }
    Instructions slices_go_on(const std::vector<std::pair<int, Round>>& rounds) {
        for (const auto& [slice, round] : rounds) {
            claimed_.erase(slice);
            if (is_lost(slice, round)) {
                awaited_step_[slice] = not_awaited;
                Frame again = open_.at(slice);
                again.peer = owner_[slice];
                lanes_.push(again);
            }
        }
        return departing();
    }

    // What others may see.
    static ProtocolError pending(int parameter, Step step, Step before) {
        return {ProtocolError::local, "parameter " + text_of(parameter) +
                                          " has a gradient for step " + text_of(step) +
                                          " while step " + text_of(before) + " is pending"};
    }
    bool awaits(int slice, Step step) const {
        if (!is_slice(slice) || step < 0 || step != awaited_step_[slice]) return false;
        return reply_ == Reply::broadcast || step == 0 || pulled_.contains(slice);
    }
    bool is_complete(int parameter) const { return missing_[parameter] == 0; }
    bool idle() const { return lanes_.idle(); }
    Step step_of(int parameter) const { return step_[parameter]; }
    // Slices of a parameter that are not answered, and whether each has left.
    std::vector<std::pair<int, bool>> missing_slices(int parameter) const {
        std::vector<std::pair<int, bool>> missing;
        if (!missing_[parameter]) return missing;
        for (int index : slices_of_[parameter]) {
            const bool has_left = awaited_step_[index] != not_awaited;
            if (has_left || lanes_.has(static_cast<int>(Kind::push), index))
                missing.emplace_back(index, has_left);
        }
        return missing;
    }
    int queue_depth() const { return lanes_.queued; }
    int most_queued() const { return most_queued_; }
    int awaited() const { return awaited_; }
    int owner_of(int slice) const { return owner_[slice]; }
    Step awaited_step(int slice) const { return awaited_step_[slice]; }
    Round open_round(int slice) const {
        const auto push = open_.find(slice);
        return push == open_.end() ? never : round_of(push->second);
    }
    bool was_unchanged(int slice) const { return unchanged_.contains(slice); }
    bool is_lost(int slice, Round round) const {
        const auto push = open_.find(slice);
        return push != open_.end() && round_of(push->second) > round;
    }
    // The last round of which a slice's answer is here.
    Round claim(int slice) const {
        const Round answered = answered_round_[slice];
        if (answered != Round{0, 0} || !came_after_) return answered;
        return open_.contains(slice) ? Round{came_after_, 0} : never;
    }

  private:
    static constexpr Step not_awaited = -1;

    static std::unique_ptr<PushWindow> make_window(const WorkerSetting& setting) {
        if (setting.window_sizes_bytes.empty()) return nullptr;
        if (setting.order != Order::priority || setting.reply != Reply::broadcast)
            throw ProtocolError(ProtocolError::internal, "a push window without broadcast replies");
        return std::make_unique<PushWindow>(setting.window_sizes_bytes, setting.window_bytes,
                                            setting.window_servers);
    }
    static SendLanes::MayLeave make_guard(const PushWindow* window) {
        if (!window) return nullptr;
        return [window](const Frame& frame, bool is_short) {
            if (frame.kind != static_cast<int>(Kind::push) || frame.flags & measure) return true;
            return window->admits(frame, is_short);
        };
    }
    static Frame frame(Kind kind, int server, Step step, int slice, int priority,
                       Flags flags = 0) {
        return {server, static_cast<int>(kind), step, slice, priority, flags, no_token};
    }

    bool is_slice(int slice) const {
        return slice >= 0 && slice < static_cast<int>(slices_.size());
    }
    Frame pull_of(int slice) const {
        const Slice& piece = slices_[slice];
        const int parameter = piece.parameter;
        return frame(Kind::pull, piece.server, step_[parameter], slice, urgency_[parameter]);
    }
    void await(int slice, Step step) {
        awaited_ += awaited_step_[slice] == not_awaited;  // else once more
        awaited_step_[slice] = step;
    }

    Instructions departing() {
        Instructions out;
        lanes_.depart(out);
        return left(std::move(out));
    }
    // Notes what leaves. Shutdown is a state: once closing, the end comes when all is empty.
    Instructions left(Instructions out) {
        most_queued_ = std::max(most_queued_, lanes_.queued);
        for (const Instruction& each : out) {
            const Frame& frame = each.frame;
            if (frame.kind == static_cast<int>(Kind::push)) {
                await(frame.slice, frame.step);
                if (window_ && !(frame.flags & (no_gradient | measure))) window_->left(frame);
            } else if (frame.kind == static_cast<int>(Kind::pull)) {
                pulled_.insert(frame.slice);
            }
        }
        if (out.empty() && closing_ && lanes_.idle()) return {{.what = Instruction::finish}};
        return out;
    }

    Instructions answered(int slice) {
        const int parameter = slices_[slice].parameter;
        awaited_step_[slice] = not_awaited;
        --awaited_;
        if (reply_ != Reply::broadcast) {
            announced_.erase(slice);
            pulled_.erase(slice);
        }
        // a part that turned out unchanged may have been the last that others waited for
        if (--missing_[parameter]) return pull_if_all_notified(parameter);
        return {completing(parameter, step_[parameter])};
    }

    Instructions pull_if_all_notified(int parameter) {
        auto& notified = notified_[parameter];
        if (notified.empty() || static_cast<int>(notified.size()) < missing_[parameter]) return {};
        for (int slice : std::exchange(notified, {})) lanes_.push(pull_of(slice));
        return departing();
    }

    ProtocolError unexpected(int slice, Step step, int server, const char* what, bool expected) {
        const std::string text =
            "server " + text_of(server) + " sent a " + what + " for slice " + text_of(slice);
        if (expected) {
            return {ProtocolError::remote,
                    text + ", which belongs to server " + text_of(owner_[slice])};
        }
        const Step awaited = is_slice(slice) ? awaited_step_[slice] : not_awaited;
        const std::string why = awaited >= 0 && awaited != step
                                    ? "step " + text_of(awaited) + " is awaited"
                                    : "it is not awaited";
        return {ProtocolError::remote, text + ", step " + text_of(step) + "; " + why};
    }

    std::vector<Slice> slices_;
    std::vector<std::vector<int>> packs_;
    Reply reply_;
    bool outlives_;
    std::unique_ptr<PushWindow> window_;
    SendLanes lanes_;
    std::vector<std::vector<int>> slices_of_;
    std::vector<int> owner_;
    std::vector<int> priority_, urgency_;
    std::vector<int> missing_;  // by parameter: slices still to be answered
    std::vector<Step> step_;
    std::vector<std::vector<int>> notified_;
    std::vector<Step> awaited_step_;
    int awaited_ = 0;
    int most_queued_ = 0;
    bool closing_ = false;
    std::map<int, Frame> open_;  // by slice, its unanswered push, if it may be lost
    std::set<int> claimed_;      // slices that may not be pushed yet to their owner
    std::vector<Round> answered_round_;
    std::set<int> unchanged_;
    Step came_after_ = 0;  // a newcomer: the step before its first one
    std::set<int> announced_, pulled_;
    std::vector<Frame> pulls_;
};

}  // namespace foreprop
