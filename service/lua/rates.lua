-- How fast a job goes, by the store's clock: what service/throughput.py adds up. Nothing here decides anything.
--
-- RATES has a ring of SLOTS slots of SLOT_S seconds, each a map of sums with `at`, the number of its slot of time: the last hour, at
-- bounded cost, since an event rewrites one slot. And `trainer`: what the trainer does now, and its seconds since its last ack.
-- A job in which nothing happens for an hour keeps none of it.

local SLOT_S, SLOTS = 5, 720
local AWAY_S = 60 -- a trainer that has not asked again by then does not wait any more
local BETWEEN_S = 600 -- between an ack and the next lease: weights are moved, a model is evaluated; what is longer is an absence
local slot -- the one of now

local function note(now, sums)
  local at = math.floor(now / SLOT_S)
  local field = whole(at % SLOTS)
  slot = slot or load(RATES, field)
  local first = not slot or slot.at ~= at
  if first then slot = { at = at } end
  for name, by in pairs(sums) do slot[name] = (slot[name] or 0) + by end
  save(RATES, field, slot)
  if first then call('EXPIRE', RATES, SLOT_S * SLOTS) end
end

-- ---------------------------------------------------------------------------------------------------------------- rollouts and groups

-- A member ended with a trajectory; spent: seconds by part, of a known few.
-- `work` of its group: the seconds that its members were worked on, and whether their rewards differ.
local function note_member(r, g, spent, now)
  local work_s, sums = 0, { generated = 1 }
  for part, seconds_of_it in pairs(spent) do
    sums[part .. '_s'] = seconds_of_it
    work_s = work_s + seconds_of_it
  end
  if r.dispatched_at then sums.timed, sums.latency_s = 1, now - r.dispatched_at end
  note(now, sums)
  local w = g.work or { total_s = 0, longest_s = 0 }
  w.total_s, w.longest_s = w.total_s + work_s, math.max(w.longest_s, work_s)
  if r.reward == nil or w.reward and r.reward ~= w.reward then w.varies = true end
  w.reward = r.reward
  g.work = w
end

-- The last member of a group ended. accepted: it is ready.
local function note_complete(g, now, accepted)
  local w = g.work or { total_s = 0, longest_s = 0, varies = true }
  local sums = { groups = 1, worked = g.ended, work_s = w.total_s, longest_s = w.longest_s }
  if g.requested_size > 1 and not w.varies then sums.zero_variance = 1 end
  if accepted then sums.accepted = g.ended end
  note(now, sums)
end

-- What a group had is not for the trainer: filtered, turned away, or it failed.
local function note_refused(g, now, cancelled)
  if g.ended == 0 then return end
  local sums = {}
  if not cancelled then sums.refused = g.ended end
  if g.ready_at then sums.accepted = -g.ended end
  note(now, sums)
end

-- ------------------------------------------------------------------------------------------------------------------------ the trainer

-- Values of staleness up to 63 as they are, higher ones rounded down by at most 1/32, so that a slot has a bounded number of them.
local function staleness_field(versions)
  local _, power = math.frexp(versions)
  local step = 2 ^ math.max(0, power - 6)
  return 'staleness:' .. whole(math.floor(versions / step) * step)
end

-- What the trainer has been doing is booked up to now.
local function trainer_until(now)
  local t = load(RATES, 'trainer') or { waited_s = 0, computed_s = 0 }
  local passed = now - (t.at or now)
  if t.doing == 'waits' then
    if passed <= AWAY_S then t.waited_s = t.waited_s + passed end
  elseif t.doing == 'computes' or t.doing == 'between' and passed <= BETWEEN_S then
    t.computed_s = t.computed_s + passed
  end
  t.at = now
  return t
end

local function save_trainer(t)
  save(RATES, 'trainer', t)
  call('EXPIRE', RATES, SLOT_S * SLOTS)
end

-- A lease call was answered. It has something to wait for: it got nothing, and something is still to come.
local function trainer_asked(now, waits)
  local t = trainer_until(now)
  t.asked_at = waits and now or nil
  t.doing = call('ZCARD', BATCH_LEASES) > 0 and 'computes' or waits and 'waits' or nil
  save_trainer(t)
end

-- A batch was acked, and is no longer among the live ones. A step whose time is not known is left out.
local function trainer_acked(now, rollouts)
  local t = trainer_until(now)
  if t.doing then note(now, { steps = 1, trained = rollouts, waited_s = t.waited_s, computed_s = t.computed_s }) end
  t.waited_s, t.computed_s = 0, 0
  t.doing = call('ZCARD', BATCH_LEASES) > 0 and 'computes' or t.asked_at and now - t.asked_at <= AWAY_S and 'waits' or 'between'
  save_trainer(t)
end

-- A lease ended without an ack: what its trainer did is nobody's step.
local function trainer_gone() call('HDEL', RATES, 'trainer') end
