// `core.membership.Members` without backups, and `core.newcomers.Newcomers.ask`: who is a member.
#pragma once

#include <map>
#include <set>

#include "frames.hpp"

namespace foreprop {

// What `engine.planeserver` makes a `MemberLeft` of.
struct Departure {
    bool is_told = false;  // the members knew of it
    Step step = 0;         // the last that it has pushed anything of
    int counted = 0;       // how many slices of that step have counted it
    int slices = 0;
};

// Whether a newcomer may count from the step that it asks for: see `core.newcomers.AnswerJoin`.
struct Promise {
    Step step = 0, least = 0, newest = 0;
    bool ending = false;
};

struct Members {
    static constexpr Step lead_steps = 2;

    Members(int ranks, int started) : workers(ranks) {
        for (int rank = 0; rank < started; ++rank) here.insert(rank);
    }
    void drop(int rank) {
        here.erase(rank);
        left.erase(rank);
        since.erase(rank);
        promised.erase(rank);
    }
    // Whether a slice of this step waits for it.
    bool counts(int rank, Step step) const {
        const auto found = since.find(rank);
        return here.contains(rank) && (found == since.end() || found->second <= step);
    }
    Step first_step(int rank) const {
        const auto found = since.find(rank);
        return found == since.end() ? 1 : found->second;
    }
    bool all_left() const { return left == here; }

    const int workers;
    std::set<int> here, left;
    std::map<int, Step> since;     // the first step that waits for who has come later
    std::map<int, Step> promised;  // the first step of who asks to join, until it is settled
};

}  // namespace foreprop
