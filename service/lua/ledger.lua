-- The books: what became of every sampled token.
--
-- What always holds: tokens_generated = tokens_delivered + tokens_discarded + what still stands, which is SAMPLED (by rollout that has not
-- ended: what its attempt has journaled; append.lua adds to it) and `sampled_tokens` of the groups that have not ended.
-- LEDGER has, by entry (`kept`, or `discarded:` and why), the fields `<entry>|rollouts`, `|tokens`, and `|<bound>` for each power of two:
-- how many of these rollouts had at most so many tokens, and more than the bound below. So what was discarded is seen beside what was kept.
-- An attempt that ended without a trajectory is an entry's rollout if it had sampled anything.

-- 0, 1, 2, 4, 8...: the least that is not below `tokens`.
local function bound(tokens)
  if tokens < 1 then return '0' end
  local _, power = math.frexp(tokens - 1)
  return whole(2 ^ power)
end

local function enter(entry, rollouts, tokens, lengths)
  if rollouts == 0 then return end
  call('HINCRBY', LEDGER, entry .. '|rollouts', rollouts)
  call('HINCRBY', LEDGER, entry .. '|tokens', tokens)
  for upto, n in pairs(lengths) do call('HINCRBY', LEDGER, entry .. '|' .. upto, n) end
end

-- The members of a group that ended with a trajectory.
local function enter_kept(g)
  count('tokens_delivered', g.sampled_tokens)
  enter('kept', g.ended, g.sampled_tokens, g.lengths or {})
end

local function enter_discarded_group(g, why)
  count('tokens_discarded', g.sampled_tokens)
  enter('discarded:' .. why, g.ended, g.sampled_tokens, g.lengths or {})
end

local function enter_discarded(tokens, why)
  if tokens == 0 then return end
  count('tokens_discarded', tokens)
  enter('discarded:' .. why, 1, tokens, { [bound(tokens)] = 1 })
end

-- What the attempt of a rollout has journaled, which the caller books now.
local function take_sampled(rid)
  local tokens = tonumber(call('HGET', SAMPLED, rid) or '0')
  call('HDEL', SAMPLED, rid)
  return tokens
end

-- A member ended with a trajectory: its tokens stand with its group now, but for those that the attempt itself gave up.
local function enter_member(rid, r, g)
  local journaled, all = take_sampled(rid), r.sampled_tokens + (r.discarded_tokens or 0)
  if all > journaled then count('tokens_generated', all - journaled) end -- journaled by a worker that kept no books
  local cut_back = r.cut_back_tokens or 0
  enter_discarded(cut_back, 'cut_back')
  enter_discarded(math.max(all, journaled) - r.sampled_tokens - cut_back, 'sampled_anew')
  g.lengths = g.lengths or {}
  local upto = bound(r.sampled_tokens)
  g.lengths[upto] = (g.lengths[upto] or 0) + 1
  g.ended, g.sampled_tokens = g.ended + 1, g.sampled_tokens + r.sampled_tokens
end
